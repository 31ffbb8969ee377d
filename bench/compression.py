"""Steps where gradients travel as they are, in fewer bits, and as two thin matrices; beside DDP with torch's own hooks for that.

    python bench/compression.py [--rates 1000,200] [--hosts 2]

All contenders take turns in one job, as in bench/run.py. Writes bench/results/compression.md.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import contenders  # noqa: E402
import table  # noqa: E402

NAMES = ("ddp", *contenders.COMPRESSIONS)
COMPARED = table.Comparison("compression", "Gradients that travel compressed", NAMES, "ddp", "1000,200")

if __name__ == "__main__":
    sys.exit(table.main(COMPARED, __doc__))
