"""Python's collector of reference cycles, in processes that live long and answer quickly."""

from __future__ import annotations

import gc

THRESHOLDS = (10_000, 20, 20)
"""Containers made more than freed before the youngest generation is looked through (Python's own
700 comes about every second request), and how often one generation is before the next older."""


def spare_startup() -> None:
    """Call once, when everything is imported.

    What is there by then, half a million objects with Ray, lives as long as the process: it is
    never looked through again. Otherwise the collector takes a tenth of a gateway's CPU, and a full
    pass stops every stream for as long as it lasts.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*THRESHOLDS)
