from __future__ import annotations

import pytest
import torch

from cluster.bench import limit
from cluster.bench.limit import LinearLayers
from engine.models.architecture import Architecture, Rope
from engine.models.linear import Linear

ARCHITECTURE = Architecture(
    name="small",
    vocab_size=40,
    hidden_size=16,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=4,
    intermediate_size=24,
    norm_eps=1e-5,
    rope=Rope(theta=10_000.0),
    max_context_tokens=64,
    tied_embeddings=True,
)


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, int]]:
    """`(rows, in, out)` of each product that ran."""
    seen: list[tuple[int, int, int]] = []

    class Recording(Linear):
        def __init__(self, weight: torch.Tensor) -> None:
            super().__init__(weight)
            self._shape = weight.shape

        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            seen.append((x.shape[0], self._shape[1], self._shape[0]))
            return super().__call__(x)

        def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
            seen.append((x.shape[0], self._shape[1], self._shape[0]))
            return super().add_to(residual, x)

    monkeypatch.setattr(limit, "Linear", Recording)
    return seen


def test_only_sampled_rows_go_on_behind_the_last_attention(products):
    LinearLayers(ARCHITECTURE, torch.float32).run(5, 1)
    qkv, o, gate_up, down = (16, 32), (16, 16), (16, 48), (24, 16)
    assert products == [
        *((5, *shape) for shape in (qkv, o, gate_up, down)),
        (5, *qkv),
        *((1, *shape) for shape in (o, gate_up, down, (16, 40))),
    ]


def test_a_chunk_in_the_middle_of_a_prompt_ends_with_its_last_keys(products):
    LinearLayers(ARCHITECTURE, torch.float32).run(5, 0)
    assert len(products) == 5
