"""Steps of one stage for all groups, beside what is chosen: for machines that nobody has calibrated, and as they were calibrated, where
groups may have stages of their own.

    python bench/stages.py [--rounds 15]

The two hosts are calibrated over links of 1000 Mbit/s first; then all contenders take turns in one job, as in bench/run.py. Writes
bench/results/stages.md.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import accuracy  # noqa: E402
import contenders  # noqa: E402
import table  # noqa: E402

from autoshard.cost_model.cluster import Cluster  # noqa: E402

MBIT = 1000
NAMES = ("compute", "autoshard0", "autoshard1", "autoshard3", "autoshard_auto", "autoshard_calibrated")
COMPARED = table.Comparison("stages", "Stages by group", NAMES, "compute", str(MBIT))


def main() -> int:
    """The command line: that of `table`, but for rates, of which one was calibrated."""
    with tempfile.TemporaryDirectory() as scratch:
        cluster: Cluster = accuracy.calibrated(Path(scratch), [(2, MBIT)])[2, MBIT]
        path = Path(scratch) / "cluster.yaml"
        path.write_text(cluster.to_yaml())
        os.environ[contenders.CALIBRATED] = str(path)
        return table.main(COMPARED, __doc__)


if __name__ == "__main__":
    sys.exit(main())
