"""Stage 0 under a budget that is less than what a step takes, of a model that saves weights which it makes of parameters.

    python bench/partition_activations.py [--rates 0,1000] [--hosts 2]

The budget is 76 MB. With `partition_activations=True` such weights may be kept in parts, one on each process (`_parts`: nothing else is
done); without, values are computed again (`_again`); `_either` is what the plan chooses of both. All contenders take turns in one job, as
in bench/run.py; the peak of each is measured in a job of its own.
Writes bench/results/partition_activations.md.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import contenders  # noqa: E402
import table  # noqa: E402

TITLE = "Saved values that all processes have alike, in parts"
COMPARED = table.Comparison(
    "partition_activations", TITLE, tuple(contenders.PARTED), "autoshard0", "0,1000", memory=True, model="factored"
)

if __name__ == "__main__":
    sys.exit(table.main(COMPARED, __doc__))
