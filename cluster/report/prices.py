"""What the hardware costs, as somebody stated it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

from engine.errors import ConfigError

_KEYS = ("name", "per_hour", "units", "replicas")


@dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """One kind of replica."""

    name: str
    per_hour: float
    """Of one unit: a GPU, a CPU, a machine."""

    units: float = 1.0
    """Of one replica."""

    replicas: float = 1.0

    def __post_init__(self) -> None:
        for key in ("per_hour", "units", "replicas"):
            value = getattr(self, key)
            if not (math.isfinite(value) and value >= 0):
                raise ConfigError(f"price {self.name!r}: {key}={value}: must be 0 or more")

    @property
    def total_per_hour(self) -> float:
        return self.per_hour * self.units * self.replicas


@dataclass(frozen=True, slots=True, kw_only=True)
class PriceTable:
    items: tuple[Price, ...]
    currency: str = "USD"

    @property
    def per_hour(self) -> float:
        return sum(item.total_per_hour for item in self.items)

    def to_json(self) -> dict[str, Any]:
        return {
            "currency": self.currency,
            "per_hour": self.per_hour,
            "items": [asdict(item) for item in self.items],
        }


def parse_prices(texts: Iterable[str], currency: str = "USD") -> PriceTable | None:
    """`NAME=PER_HOUR[xUNITS[xREPLICAS]]` each, such as `gpu=2.50x4x2`; None without any.

    Raises ConfigError.
    """
    items: list[Price] = []
    for text in texts:
        name, equals, rest = text.partition("=")
        try:
            numbers = [float(part) for part in rest.split("x")]
        except ValueError:
            numbers = []
        if not equals or not name.strip() or not 1 <= len(numbers) <= 3:
            raise ConfigError(
                f"{text!r}: a price reads NAME=PER_HOUR[xUNITS[xREPLICAS]], such as gpu=2.50x4x2"
            )
        keys = ("per_hour", "units", "replicas")
        items.append(Price(name=name.strip(), **dict(zip(keys, numbers, strict=False))))
    return PriceTable(items=tuple(items), currency=currency) if items else None


def read_prices(path: Path) -> PriceTable:
    """A YAML file: `currency`, and `items` with `name`, `per_hour`, `units` and `replicas`.

    Raises ConfigError naming what is at fault.
    """
    try:
        data = yaml.safe_load(path.read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: not a price table: {error}") from error
    if not isinstance(data, dict) or not isinstance(data.get("items"), list) or not data["items"]:
        raise ConfigError(f"{path}: a price table needs `items:` with name and per_hour of each")
    if unknown := set(data) - {"currency", "items"}:
        raise ConfigError(f"{path}: {sorted(unknown)[0]!r}: there are currency and items")
    return PriceTable(
        items=tuple(_item(path, item) for item in data["items"]),
        currency=str(data.get("currency", "USD")),
    )


def _item(path: Path, item: Any) -> Price:
    if not isinstance(item, Mapping) or not {"name", "per_hour"} <= set(item):
        raise ConfigError(f"{path}: {item!r}: an item has a name and per_hour")
    if unknown := [key for key in item if key not in _KEYS]:
        raise ConfigError(f"{path}: {unknown[0]!r} of an item: there are {', '.join(_KEYS)}")
    try:
        numbers = {key: float(item[key]) for key in _KEYS[1:] if key in item}
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{path}: {item['name']!r}: {error}") from error
    return Price(name=str(item["name"]), **numbers)
