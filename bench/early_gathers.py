"""Steps whose first gathers start in forward, and when the optimizer has stepped, in a loop that does something else in between.

    python bench/early_gathers.py [--rates 0,1000] [--hosts 2]

All contenders take turns in one job, as in bench/run.py, with a pause after each step. Writes
bench/results/early_gathers.md.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import table  # noqa: E402

NAMES = ("autoshard1", "autoshard1_early", "autoshard3", "autoshard3_early")
COMPARED = table.Comparison("early_gathers", "Gathers that start early", NAMES, "autoshard3", "0,1000", pause=30)

if __name__ == "__main__":
    sys.exit(table.main(COMPARED, __doc__))
