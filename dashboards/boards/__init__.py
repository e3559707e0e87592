"""One module a dashboard; `boards()` are all of them in the order a reader meets them."""

from __future__ import annotations

from dashboards.boards.cost import COST
from dashboards.boards.engine import ENGINE
from dashboards.boards.gpu import GPU
from dashboards.boards.pd import PD
from dashboards.boards.queue import QUEUE
from dashboards.boards.tail import TAIL
from dashboards.panels import Board


def boards() -> tuple[Board, ...]:
    """Every dashboard there is."""
    return (TAIL, QUEUE, PD, ENGINE, GPU, COST)
