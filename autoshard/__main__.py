"""`python -m autoshard` is `autoshard`."""

from autoshard.cli import run

run()
