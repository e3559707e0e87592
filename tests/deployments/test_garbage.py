from __future__ import annotations

import gc

from deployments.garbage import THRESHOLDS, spare_startup


def test_what_is_there_at_startup_is_never_looked_through_again() -> None:
    before = gc.get_threshold()
    kept = [[i] for i in range(100)]
    try:
        spare_startup()
        assert gc.get_freeze_count() > len(kept)
        assert gc.get_threshold() == THRESHOLDS
        assert not any(item is kept for item in gc.get_objects())
    finally:
        gc.unfreeze()
        gc.set_threshold(*before)
