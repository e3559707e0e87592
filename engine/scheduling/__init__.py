"""What each forward pass computes, decided without doing it."""

from engine.scheduling.plan import Chunk, Entered, StepPlan, StepResult
from engine.scheduling.scheduler import Committed, Reservation, Scheduler

__all__ = [
    "Chunk",
    "Committed",
    "Entered",
    "Reservation",
    "Scheduler",
    "StepPlan",
    "StepResult",
]
