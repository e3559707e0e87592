"""An engine over ranks is put together whole, or nothing of it is left."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest

from engine.build import _on_ranks
from engine.config import EngineConfig, ModelConfig
from engine.errors import ConfigError
from engine.execution.ranks.wire import RankReady, machine
from engine.models.model import KVLayout
from engine.text.text_model import load_text

TOKENIZER = load_text("tiny").tokenizer
LAYOUT = KVLayout(num_layers=2, num_kv_heads=1, head_dim=4, dtype="float32", fingerprint="f")
GB = 10**9


def ready(rank):
    return RankReady(
        pid=1,
        host=machine(),
        on_host=True,
        dtype="float32",
        vocab_size=256,
        max_context_tokens=128,
        eos_token_ids=(),
        layers=(0, 2),
        kv_heads=(rank, rank + 1),
        owned_kv_heads=(rank, rank + 1),
        layout=LAYOUT,
        weight_bytes=0,
        load_s=0.0,
    )


class Memory:
    on_lost = None

    def close(self):
        """Nothing to end."""


class Executor:
    pids = ()
    closed = False

    def kill(self, reason):
        """Nothing to end."""

    def close(self):
        self.closed = True


class Start:
    """Two ranks that have loaded; `error` is what becomes of the memory they are to take."""

    read_channels = ()

    def __init__(self, error=None, **changes):
        self.ready = [replace(ready(rank), **changes) for rank in range(2)]
        self.error, self.closed = error, False
        self.shared = []
        self.memories = [None if file else Memory() for file in self.files()]
        self.made = Executor()

    def files(self):
        return [rank.on_host for rank in self.ready]

    def allocate(self, num_blocks, shared, *, limit_s):
        assert [file is not None for file in shared] == self.files()
        self.shared = shared
        if self.error is not None:
            raise self.error
        return self.memories

    def executor(self):
        return self.made

    def close(self):
        self.closed = True


def build(start, **options):
    model = ModelConfig(name="m", source="tiny")
    return _on_ranks(EngineConfig(model=model, tensor_parallel=2, **options), TOKENIZER, start)


def test_ranks_that_cannot_take_their_memory_leave_nothing_behind():
    start = Start(ConfigError("no memory"))
    with pytest.raises(ConfigError, match="no memory"):
        build(start, num_blocks=4)
    assert start.closed
    assert not any(map(os.path.exists, start.shared))


def test_a_cache_that_cannot_be_ends_the_ranks():
    start = Start()
    with pytest.raises(ConfigError, match="reuse_tokens=24: must divide block_tokens=64"):
        build(start, num_blocks=4, block_tokens=64, reuse_tokens=24)
    assert start.closed
    assert start.made.closed


def test_ranks_on_devices_say_how_much_is_free_and_their_memory_ends_the_group_when_it_is_lost():
    start = Start(on_host=False, free_bytes=GB)
    built = build(start)
    assert built.memory.free_bytes == 2 * GB
    assert built.memory.kv_tokens == 64 * 128  # more cannot run
    assert [memory.on_lost for memory in start.memories] == [start.made.kill] * 2
    assert not start.closed
    with pytest.raises(ConfigError, match=r"kv_memory_bytes=3000000000: .* needs 3\.0 GB"):
        build(Start(on_host=False, free_bytes=GB), kv_memory_bytes=3 * GB)


def test_ranks_on_cpus_of_other_machines_need_a_size():
    with pytest.raises(ConfigError, match="CPU ranks on other machines is not measured"):
        build(Start(host="elsewhere", on_host=True))
