"""How seldom tests look for garbage: a fifth of what one that plans takes is looking for it."""

from __future__ import annotations

import gc

THRESHOLDS = (50_000, 20, 100)  # of objects; and of younger generations' collections


def collect_seldom() -> None:
    """Freezes what was imported, half a million objects and more, through which each collection of everything would go."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*THRESHOLDS)
