"""Stage 3 under a budget that has no room for more gathered copies: steps that gather again, and steps that compute again instead.

    python bench/one_budget.py [--rates 1000,200] [--hosts 2]

The budget is what stage 3 takes with all that torch saves. With `recompute="none"` backward gathers almost every copy again; with
"auto" some activations are computed again, and copies kept in their place. All contenders take turns in one job, as in bench/run.py; the
peak of each is measured in a job of its own.
Writes bench/results/one_budget.md.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import contenders  # noqa: E402
import table  # noqa: E402

NAMES = (*contenders.BUDGETED, "fsdp2")
COMPARED = table.Comparison("one_budget", "Activations and gathered copies in one budget", NAMES, "autoshard3_none", "1000,200", memory=True)

if __name__ == "__main__":
    sys.exit(table.main(COMPARED, __doc__))
