"""Which devices a process owns: CUDA's rule for `CUDA_VISIBLE_DEVICES`, without CUDA."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

VARIABLE = "CUDA_VISIBLE_DEVICES"

Selection = tuple[str, ...]
"""Indices (`0`), UUIDs or their beginnings (`GPU-8f1e`), and MIG UUIDs (`MIG-...`), in order."""


def owned(environ: Mapping[str, str], assigned: Sequence[str] | None) -> Selection | None:
    """What this process owns; None is every device of the machine.

    assigned: the GPUs that Ray gave to this actor, None outside Ray. An actor that asked for no GPU
    sees all of them and owns none.
    """
    said = environ.get(VARIABLE)
    if said is not None:
        return parse(said)
    return None if assigned is None else tuple(assigned)


def parse(value: str) -> Selection:
    """As CUDA reads it: what follows an entry that is no device is not visible either."""
    chosen: list[str] = []
    for entry in value.split(","):
        entry = entry.strip()
        if not (entry.isdecimal() or entry.startswith(("GPU-", "MIG-"))):
            break
        chosen.append(entry)
    return tuple(chosen)
