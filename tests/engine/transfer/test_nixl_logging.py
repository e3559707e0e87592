"""NIXL's import and the handlers that this process has already."""

import subprocess
import sys

import pytest

pytest.importorskip("nixl_cu12")

_SCRIPT = """
import logging
import logging.handlers

file = logging.StreamHandler()
gathering = logging.handlers.MemoryHandler(100, target=file)
logging.getLogger("ray.serve").addHandler(gathering)
from engine.transfer.nixl import require_nixl

require_nixl()
assert gathering.target is file, "closed"
assert logging.raiseExceptions
assert not logging.getLogger("nixl").handlers
logging.getLogger("ray.serve").warning("what comes last")
"""


def test_logs_of_a_replica_go_on_after_nixl_was_imported() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT], capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    # Gathered, and written at the end: the handler is still known to `logging.shutdown`.
    assert done.stderr.splitlines()[-1] == "what comes last"
