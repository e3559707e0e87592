"""Settings of the whole test run, and what several folders of tests share (`support/`)."""

import os
import sys
from pathlib import Path

# Machines that run the tests have few cores, and several engines share them: threads that spin for
# each other cost more than they bring.
os.environ.setdefault("OMP_NUM_THREADS", "1")

sys.path.insert(0, str(Path(__file__).parent / "support"))

from serving import cluster  # noqa: F401 - the fixture
