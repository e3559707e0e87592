"""The shape of the house: who imports whom, and what must stay out of light processes."""

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = ("engine", "deployments", "cluster")

LIGHT = [
    "cluster.cli",
    "cluster.config",
    "dashboards.command",
    "cluster.explain",
    "deployments.admission.actor",
    "deployments.admission.client",
    "deployments.admission.queue",
    "deployments.app",
    "deployments.decode",
    "deployments.gateway.deployment",
    "deployments.gateway.process",
    "deployments.lifecycle.machine",
    "deployments.prefill",
    "deployments.routing.choice",
    "deployments.routing.replicas",
    "engine",
    "engine.cache.blocks",
    "engine.scheduling.scheduler",
    "engine.text.text_model",
    "engine.transfer.transport",
]


@pytest.mark.parametrize("module", LIGHT)
def test_a_light_module_brings_in_neither_torch_nor_transformers(module):
    script = f"""
import sys, {module}
heavy = {{name.split('.')[0] for name in sys.modules}} & {{'torch', 'transformers', 'vllm'}}
sys.exit(','.join(sorted(heavy)) or 0)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stderr.strip()) == (0, "")


def imports_of(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module.split(".")[0])
    return names


@pytest.mark.parametrize(
    ("folder", "forbidden"),
    [("engine", {"deployments", "cluster", "ray", "fastapi"}), ("deployments", {"cluster"})],
)
def test_imports_point_one_way(folder, forbidden):
    found = {
        str(path.relative_to(ROOT)): sorted(bad)
        for path in (ROOT / folder).rglob("*.py")
        if (bad := imports_of(path) & forbidden)
    }
    assert found == {}


@pytest.mark.parametrize("folder", ["engine/cache", "engine/scheduling"])
def test_decision_cores_know_no_clock_thread_or_tensor(folder):
    forbidden = {"asyncio", "random", "threading", "time", "torch"}
    found = {
        path.name: sorted(bad)
        for path in (ROOT / folder).glob("*.py")
        if (bad := imports_of(path) & forbidden)
    }
    assert found == {}


def test_every_public_name_of_the_engine_can_be_had():
    engine = importlib.import_module("engine")
    assert engine.__all__ == sorted(engine.__all__)
    for name in engine.__all__:
        assert getattr(engine, name) is not None


def test_no_package_under_tests_shadows_a_real_one():
    assert list((ROOT / "tests").rglob("__init__.py")) == []
