"""Free memory as measured, pools sized from it, and engines that start together."""

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from engine.build import assemble, build_engine
from engine.config import EngineConfig, ModelConfig, SchedulerConfig
from engine.errors import ConfigError
from engine.memory import (
    Claims,
    FreeMemory,
    MemoryPlan,
    PoolSize,
    free_host_memory,
    free_on_devices,
)
from engine.models.fake import FakeModel
from engine.text.text_model import load_text

MB = 1_000_000
PER_TOKEN = 1000


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


MEMINFO = "MemTotal:       1000 kB\nMemFree:  10 kB\nMemAvailable:    800 kB\n"


def test_without_limits_free_is_what_the_kernel_calls_available(tmp_path):
    root = tree(tmp_path, {"proc/meminfo": MEMINFO, "proc/self/cgroup": "0::/a/b\n"})
    assert free_host_memory(root) == FreeMemory(800 * 1024, "MemAvailable")


def test_the_narrowest_limit_around_the_process_counts_with_its_cached_files(tmp_path):
    group = "sys/fs/cgroup/a"
    root = tree(
        tmp_path,
        {
            "proc/meminfo": MEMINFO,
            "proc/self/cgroup": "0::/a/b\n",
            f"{group}/memory.max": "500000\n",
            f"{group}/memory.current": "400000\n",
            f"{group}/memory.stat": "anon 300000\ninactive_file 50000\n",
            f"{group}/b/memory.max": "max\n",
        },
    )
    assert free_host_memory(root) == FreeMemory(150_000, "the memory limit of cgroup /a")


def test_a_container_that_sees_its_group_as_the_root_is_found(tmp_path):
    root = tree(
        tmp_path,
        {
            "proc/meminfo": MEMINFO,
            "proc/self/cgroup": "0::/kubepods/pod1/x\n",
            "sys/fs/cgroup/memory.max": "200000",
            "sys/fs/cgroup/memory.current": "100000",
            "sys/fs/cgroup/memory.stat": "inactive_file 0",
        },
    )
    assert free_host_memory(root).num_bytes == 100_000


def test_version_1_of_cgroups_is_read_too(tmp_path):
    group = "sys/fs/cgroup/memory/g"
    root = tree(
        tmp_path,
        {
            "proc/meminfo": MEMINFO,
            "proc/self/cgroup": "9:name=systemd:/\n4:memory:/g\n0::/\n",
            f"{group}/memory.limit_in_bytes": "300000\n",
            f"{group}/memory.usage_in_bytes": "100000\n",
            f"{group}/memory.stat": "cache 5\ntotal_inactive_file 20000\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712",
        },
    )
    assert free_host_memory(root) == FreeMemory(220_000, "the memory limit of cgroup /g")


def test_a_kernel_that_does_not_say_is_an_error_with_a_way_out(tmp_path):
    with pytest.raises(ConfigError, match=r"cannot be read .* set kv_memory_bytes"):
        free_host_memory(tmp_path)


def test_this_machine_has_memory():
    assert free_host_memory().num_bytes > 0


def pool(**options):
    values = {
        "num_blocks": None,
        "kv_memory_bytes": None,
        "kv_memory_fraction": 0.25,
        "block_tokens": 16,
        "useful_tokens": 10**9,
    }
    return PoolSize(**(values | options))


FREE = FreeMemory(100 * MB, "MemAvailable")


def test_a_pool_takes_its_fraction_of_what_is_free_in_whole_blocks():
    assert pool().blocks(PER_TOKEN, FREE) == 25 * MB // 16_000


def test_a_fraction_takes_no_more_than_requests_can_hold():
    assert pool(useful_tokens=1000).blocks(PER_TOKEN, FREE) == 63 + 1


def test_an_explicit_size_is_taken_as_it_is():
    assert pool(kv_memory_bytes=99 * MB).blocks(PER_TOKEN, FREE) == 99 * MB // 16_000
    assert pool(num_blocks=7, kv_memory_bytes=1).blocks(PER_TOKEN, FREE) == 7


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"kv_memory_bytes": 101 * MB}, "kv_memory_bytes=101000000"),
        ({"num_blocks": 6300}, "num_blocks=6300"),
    ],
)
def test_an_explicit_size_that_does_not_fit_is_refused_with_need_free_and_way_out(options, said):
    with pytest.raises(ConfigError) as raised:
        pool(**options).blocks(PER_TOKEN, FREE)
    message = str(raised.value)
    for part in (
        said,
        "needs 101 MB",
        "free are 100 MB (MemAvailable)",
        "at most 100000000 bytes (6250 blocks)",
        "kv_memory_fraction",
    ):
        assert part in message


def test_what_others_are_about_to_take_is_named():
    free = FreeMemory(50 * MB, "MemAvailable", announced_bytes=30 * MB)
    with pytest.raises(ConfigError, match=r"50 MB \(MemAvailable, 30 MB that other engines are"):
        pool(kv_memory_bytes=60 * MB).blocks(PER_TOKEN, free)


def test_memory_without_room_for_a_block_is_refused():
    with pytest.raises(ConfigError, match=r"kv_memory_fraction=0\.25 of 0 MB .* two are needed"):
        pool().blocks(PER_TOKEN, FreeMemory(-5, "MemAvailable"))
    with pytest.raises(ConfigError, match=r"kv_memory_bytes=17000: one block .* 16000 bytes"):
        pool(kv_memory_bytes=17_000).blocks(PER_TOKEN, FREE)


def test_start_up_says_what_memory_is_used_for():
    plan = MemoryPlan(
        weight_bytes=269 * MB,
        kv_bytes=1500 * MB,
        kv_tokens=65_000,
        free_bytes=6000 * MB,
        context_tokens=8192,
    )
    assert (plan.full_batch, plan.batch_at(1000)) == (7, 65)
    assert str(plan) == (
        "weights 269 MB, KV 1.5 GB of 6.0 GB free: 65000 tokens; largest batch 63 of 1024 tokens, "
        "7 of 8192 tokens"
    )


_ANNOUNCE = """
import sys
from pathlib import Path
from engine.memory import Claims
Claims(Path(sys.argv[1])).announce(70)
print("announced", flush=True)
sys.stdin.read()
"""


def test_what_another_living_engine_announced_counts_until_it_is_taken(tmp_path):
    claims = Claims(tmp_path / "claims")
    with claims.locked():
        assert claims.others() == 0
    claims.announce(5)
    assert claims.others() == 0  # one's own
    command = [sys.executable, "-c", _ANNOUNCE, str(tmp_path / "claims")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"announced\n"
        assert claims.others() == 70
    # It ended without taking it back: what dead processes announced counts no longer.
    assert claims.others() == 0
    claims.clear()
    assert sorted(os.listdir(tmp_path / "claims")) == ["lock"]


def test_where_engines_cannot_announce_each_measures_by_itself(tmp_path):
    (tmp_path / "file").touch()
    claims = Claims(tmp_path / "file" / "claims")
    claims.announce(5)
    with claims.locked() as announced:
        assert announced == 0
    claims.clear()


def test_a_directory_that_can_be_written_no_more_stops_nobody(tmp_path, caplog):
    claims = Claims(tmp_path)
    for name in ("lock", f".{os.getpid()}", f"{os.getpid()}.json"):
        (tmp_path / name).mkdir()
    for _ in range(2):
        claims.announce(5)
        with claims.locked() as announced:
            assert announced == 0
        claims.clear()
    (record,) = caplog.records
    assert "may count the same free memory twice" in record.getMessage()


def test_ranks_on_devices_take_no_more_than_the_fullest_of_them_can():
    free = free_on_devices([(900, 10), (500, 10), (600, 20)])
    assert free.num_bytes == 30 * 40
    assert free.source == "the drivers, for 3 ranks: rank 2 has the least room"
    assert free.usual_fraction == 0.9
    assert free_on_devices([(900, 10), (None, 10)]) is None


def build(**options):
    config = EngineConfig(model=ModelConfig(name="f", source="fake"), **options)
    return assemble(config, FakeModel(), load_text("fake").tokenizer)


def test_an_engine_takes_what_is_configured_or_what_its_requests_can_use():
    per_token = FakeModel().layout.bytes_per_token
    explicit = build(kv_memory_bytes=100 * 16 * per_token).memory
    assert (explicit.kv_tokens, explicit.kv_bytes) == (99 * 16, 100 * 16 * per_token)
    few = SchedulerConfig(max_running_requests=2)
    filled = build(scheduler=few, max_context_tokens=256).memory
    assert (filled.kv_tokens, filled.full_batch, filled.context_tokens) == (512, 2, 256)
    assert filled.free_bytes > filled.kv_bytes


def test_an_engine_that_does_not_fit_does_not_start():
    with pytest.raises(ConfigError, match=r"needs 1000000 GB, free are .* lower it to at most"):
        build(kv_memory_bytes=10**15)
    with pytest.raises(ConfigError, match=r"the memory this replica declares"):
        build(kv_memory_bytes=4 * MB, memory_limit_bytes=1 * MB)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_memory_fraction": 1.5}, r"kv_memory_fraction=1\.5: must be above 0 and at most 1"),
        ({"kv_memory_fraction": 0.5, "kv_memory_bytes": 9}, r"kv_memory_bytes=9: .* one size"),
        ({"kv_memory_bytes": 0}, r"kv_memory_bytes=0: must be 1 or more"),
    ],
)
def test_sizes_that_contradict_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        EngineConfig(model=ModelConfig(name="f", source="fake"), **options)


_POOL = """
import os
from pathlib import Path
from engine.execution.pool import KVPool
from engine.models.tiny import tiny_model

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

layout = tiny_model().layout
before = resident()
pool = KVPool(layout, 64_000_000 // (16 * layout.bytes_per_token), 16)
print((resident() - before) / pool.data.nbytes)
"""


def test_a_pool_has_its_memory_from_the_start():
    # In a process that has freed nothing yet, whose pages a pool could take.
    said = subprocess.run([sys.executable, "-c", _POOL], capture_output=True, check=True, text=True)
    assert float(said.stdout) > 0.9


def test_what_will_be_refused_is_not_announced(monkeypatch):
    """Or engines that fit would be refused along with it."""
    announced = []
    monkeypatch.setattr(Claims, "announce", lambda self, num_bytes: announced.append(num_bytes))
    tokenizer = load_text("fake").tokenizer
    for kv_memory_bytes in (4 * MB, 10**15):
        config = EngineConfig(
            model=ModelConfig(name="f", source="fake"),
            kv_memory_bytes=kv_memory_bytes,
            num_threads=1,
        )
        with contextlib.suppress(ConfigError):
            build_engine(config, tokenizer)
    assert announced == [4 * MB] * 2 + [0] * 2
