"""Settings of the whole test run, and what several folders of tests share (`support/`)."""

import os
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# Machines that run the tests have few cores, and several engines share them: threads that spin for
# each other cost more than they bring.
os.environ.setdefault("OMP_NUM_THREADS", "1")

sys.path.insert(0, str(Path(__file__).parent / "support"))

from serving import cluster  # noqa: F401 - the fixture

# The same examples in every run, however long each takes: what fails here was broken by the change
# that is tested. `pytest --hypothesis-profile=explore` looks for new ones.
_SLOW_MACHINE = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("repeat", derandomize=True, database=None, **_SLOW_MACHINE)
settings.register_profile("explore", **_SLOW_MACHINE)
settings.load_profile("repeat")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What asks the shared session comes last: until then the session takes no time from others."""
    items.sort(key=lambda item: "cluster" in getattr(item, "fixturenames", ()))
