"""The script for GPU machines runs to the end without one, saying what it could not check."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).with_name("check.py")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: run the script itself")
def test_without_a_gpu_it_ends_with_3_and_a_row_for_everything(tmp_path):
    report = tmp_path / "report.json"
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--json", str(report)],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 3, done.stderr
    found = json.loads(report.read_text())
    assert (found["wrong"], found["status"]) == (0, 3)
    rows = {row["name"]: row for row in found["rows"]}
    for name in (
        "attention",
        "products",
        "sampling",
        "decoder",
        "transformers",
        "graphs",
        "decode",
        "prefill",
        "prefill and decode apart",
        "nixl",
    ):
        assert rows[name]["status"] == "unchecked"
        assert "CUDA" in rows[name]["value"], "the reason is said"
    assert rows["environment: torch"]["status"] == "ok"
    lines = done.stdout.splitlines()
    assert len(lines) == len(rows) + 1, "the table has every row, and a last line"
    assert "exit status 3" in lines[-1]


@pytest.mark.gpu
def test_on_a_gpu_nothing_is_wrong(tmp_path):
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    report = tmp_path / "report.json"
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--json", str(report)],
        capture_output=True,
        text=True,
        timeout=1200,
        check=False,
    )
    assert done.returncode in (0, 3), done.stdout
    assert json.loads(report.read_text())["wrong"] == 0


@pytest.fixture
def rehearsal(monkeypatch):
    """The script on a CPU that passes for a GPU: twins for kernels, repetition for graphs, and
    times that mean nothing. What is left is the script itself."""
    from device_graphs import FakeRecorder

    from engine.attention import select
    from engine.attention.capabilities import Device
    from engine.attention.flash import FlashAttention, FlashCalls
    from engine.attention.flash_twin import flash_attn_varlen_func, flash_attn_with_kvcache
    from engine.execution import cuda

    spec = importlib.util.spec_from_file_location("gpu_check", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "gpu_check", script)  # its dataclasses look it up
    spec.loader.exec_module(script)

    missing = {"triton": "Triton is not installed"}
    device = Device(kind="cuda", compute=(9, 0), missing=missing, name="rehearsal")

    def twin(found, needs, *, window, wanted="auto", softcap=0.0):
        calls = FlashCalls(flash_attn_varlen_func, flash_attn_with_kvcache)
        return wanted, FlashAttention(calls, window=window, softcap=softcap)

    def once(run, repeats=20):
        run()
        return 1.0

    monkeypatch.setattr(select, "cuda_device", lambda index=0: device)
    monkeypatch.setattr(select, "make_attention", twin)
    monkeypatch.setattr(cuda, "CudaRecorder", FakeRecorder)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(script, "gpu", lambda: torch.device("cpu"))
    monkeypatch.setattr(script, "seconds", once)
    monkeypatch.setattr(script, "copy_rate", lambda device: 1e12)
    monkeypatch.setattr(script, "product_rate", lambda device: 1e15)
    monkeypatch.setattr(script, "timed_shape", lambda device: script.small())
    monkeypatch.setattr(script, "PREFILL_TOKENS", (300,))
    cases = [("decode", (1, 1), (5, 300)), ("mixed", (1, 40), (9, 40)), ("long", (6, 2), (4, 20))]
    monkeypatch.setattr(script, "attention_cases", lambda: cases)
    return script


@pytest.mark.parametrize(
    ("name", "rows"),
    [
        ("attention", 12),
        ("products", 2),
        ("sampling", 2),
        ("decoder", 2),
        ("transformers", 1),
        ("graphs", 2),
        ("decode", 4),
        ("prefill", 2),
        ("prefill and decode apart", 1),
    ],
)
def test_what_the_script_would_do_on_a_gpu_is_rehearsed(rehearsal, name, rows):
    found = rehearsal.run([name], 100.0)
    assert [row for row in found if row.status == "wrong"] == []
    assert sum(row.status == "ok" for row in found) == rows


def test_a_wrong_result_is_said_and_ends_with_1(rehearsal, monkeypatch, capsys):
    monkeypatch.setattr(rehearsal, "against_definition", lambda *args, **kwargs: 0.5)
    monkeypatch.setattr(sys, "argv", ["check.py", "--only", "attention"])
    assert rehearsal.main() == 1
    assert "exit status 1" in capsys.readouterr().out
