"""`python -m autoshard` is `autoshard`."""

import sys

from autoshard.cli import main

sys.exit(main())
