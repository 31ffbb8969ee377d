"""Steps where rows travel in one step over all processes, and where they go between hosts and inside of them by themselves.

    python bench/hierarchy.py [--rates 0,1000] [--hosts 2] [--per-host 2]

Hosts are network namespaces with several processes of one thread each; on two cores four of them compute at half the speed. All
contenders take turns in one job, as in bench/run.py. Writes bench/results/hierarchy.md.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import contenders  # noqa: E402
import table  # noqa: E402

NAMES = ("ddp", "fsdp2", *contenders.HIERARCHIES)
COMPARED = table.Comparison("hierarchy", "Between hosts, and inside of them", NAMES, "fsdp2", "0,1000", per_host=2)

if __name__ == "__main__":
    sys.exit(table.main(COMPARED, __doc__))
