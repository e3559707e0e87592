"""Settings of the whole test run."""

import os

# Machines that run the tests have few cores, and several engines share them: threads that spin for
# each other cost more than they bring.
os.environ.setdefault("OMP_NUM_THREADS", "1")
