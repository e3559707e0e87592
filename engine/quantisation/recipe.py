"""How a checkpoint is to be quantised, as a value."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from engine.errors import ConfigError
from engine.models.architecture import Architecture
from engine.quantisation.codes import BLOCK

METHODS: Final = ("gptq", "awq", "rtn")
BITS: Final = (4, 8)
ORDERS: Final = ("off", "static", "groups")
WHOLE_ROW: Final = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Raises ConfigError for what no checkpoint can be."""

    method: str
    """`gptq`, `awq` or `rtn`: how codes are chosen, and the format that they are stored in
    (GPTQ's, AutoAWQ's, compressed-tensors')."""

    bits: int = 4
    group: int = 32
    """Inputs that share a scale; -1: all of a row."""

    symmetric: bool = False
    """Groups have no zero of their own. 8 bits are always symmetric but in GPTQ's format."""

    order: str = "static"
    """GPTQ: see `engine.quantisation.gptq.Order`."""

    damping: float = 0.01
    """GPTQ: share of the mean that is added to the diagonal of the inputs' second moment."""

    scales: bool = False
    """AWQ's scales before GPTQ chooses codes. AWQ has them always."""

    feedback: bool = False
    """GPTQ's choice of codes after AWQ's scales, in AWQ's format. GPTQ has it always."""

    sweeps: int = 1
    """With GPTQ's choice: how often scales and codes are improved in turn afterwards."""

    correction: float = 0.0
    """With GPTQ's choice: the share of what the matrices before have changed in the inputs that a
    matrix makes good, 0 to 1."""

    def __post_init__(self) -> None:
        for name, value, known in (
            ("method", self.method, METHODS),
            ("bits", self.bits, BITS),
            ("order", self.order, ORDERS),
        ):
            if value not in known:
                raise ConfigError(f"{name}={value!r}: must be one of {', '.join(map(str, known))}")
        if self.group != WHOLE_ROW and (self.group < BLOCK or self.group % BLOCK):
            raise ConfigError(
                f"group={self.group}: must be a multiple of {BLOCK}, or -1 for whole rows"
            )
        if self.method == "awq" and self.bits != 4:
            raise ConfigError(
                f"bits={self.bits}: AWQ's format has 4 bits only: use gptq or rtn for {self.bits}"
            )
        if not 0.0 < self.damping <= 1.0:
            raise ConfigError(f"damping={self.damping}: must be above 0 and at most 1")
        if not 0.0 <= self.correction <= 1.0:
            raise ConfigError(f"correction={self.correction}: must be 0 to 1")
        if self.sweeps < 0:
            raise ConfigError(f"sweeps={self.sweeps}: must be 0 or more")
        if self.method == "awq" and self.order == "groups" and self.feedback:
            raise ConfigError(
                "order='groups': AWQ's format has no place for it: use 'static' or 'off'"
            )

    @property
    def gptq_choice(self) -> bool:
        """Whether codes are chosen with error feedback."""
        return self.method == "gptq" or (self.method == "awq" and self.feedback)

    @property
    def awq_scales(self) -> bool:
        return self.method == "awq" or (self.method == "gptq" and self.scales)

    @property
    def calibrated(self) -> bool:
        """Whether text is needed."""
        return self.method != "rtn"

    def group_for(self, size: int) -> int:
        """Inputs of a group in a matrix of so many inputs."""
        return size if self.group == WHOLE_ROW else self.group

    def check(self, architecture: Architecture) -> None:
        """Raises ConfigError for a model whose matrices these groups or the format cannot hold."""
        a = architecture
        inputs = {"q, k, v, gate and up": a.hidden_size, "o": a.q_size, "down": a.intermediate_size}
        for what, size in inputs.items():
            if size % self.group_for(size):
                fitting = [
                    g for g in range(BLOCK, 257, BLOCK) if not any(n % g for n in inputs.values())
                ]
                raise ConfigError(
                    f"group={self.group} does not divide the {size} inputs of {what}: "
                    f"{', '.join(map(str, fitting)) or 'no multiple of 32'} would, and -1 does"
                )
        per_word = 32 // self.bits
        sizes = {
            "inputs of q, k, v, gate and up": a.hidden_size,
            "inputs of o": a.q_size,
            "inputs of down": a.intermediate_size,
            "outputs of k and v": a.kv_size,
        }
        for what, size in sizes.items():
            if size % per_word:
                raise ConfigError(
                    f"{size} {what}: {self.method} packs {per_word} numbers of {self.bits} bits "
                    "into a word, which must divide them: such a model cannot be stored"
                )
