"""Graphs without a device: the recorded function is run again.

Like a real recording it sees nothing but its static tensors, every host value is what it was when
it was recorded, and results keep their place.
"""

import torch

from engine.attention.flash import FlashAttention, FlashCalls
from engine.attention.flash_twin import flash_attn_varlen_func, flash_attn_with_kvcache
from engine.models.decoder import Decoder
from engine.models.tiny import TINY_ARCHITECTURE, tiny_fingerprint, tiny_tensors


class FakeGraph:
    def __init__(self, run, result):
        self._run = run
        self._result = result

    def replay(self):
        with torch.inference_mode():
            self._result.copy_(self._run())


class FakeRecorder:
    def __init__(self):
        self.num_recorded = 0

    def record(self, run):
        self.num_recorded += 1
        result = run()
        return FakeGraph(run, result), result


def tiny_on_device():
    """The tiny decoder with a GPU's attention, whose kernels are the twins: it reads lengths from
    tensors, as a recording must."""
    return Decoder(
        TINY_ARCHITECTURE,
        tiny_tensors(),
        dtype=torch.float64,
        fingerprint=tiny_fingerprint(torch.float64),
        attention=FlashAttention(FlashCalls(flash_attn_varlen_func, flash_attn_with_kvcache)),
    )
