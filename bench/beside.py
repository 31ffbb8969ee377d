"""Compute alone while a link carries what a plan sends, at no particular time: what no order of the same bytes goes below here.

    python bench/beside.py [--rates 0,1000] [--hosts 2]

Where processors carry what links carry, a step whose communication hides wholly still takes longer than compute alone. All
contenders take turns in one job, as in bench/run.py. Writes bench/results/beside.md.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import table  # noqa: E402

NAMES = ("compute", "compute_beside0", "autoshard0", "compute_beside3", "autoshard3")
COMPARED = table.Comparison("beside", "Compute beside a link that carries as much", NAMES, "compute", "0,1000")

if __name__ == "__main__":
    sys.exit(table.main(COMPARED, __doc__))
