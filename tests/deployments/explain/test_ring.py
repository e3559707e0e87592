from __future__ import annotations

import random

from deployments.explain.ring import Ring


def add(ring: Ring[str], key: str, duration_s: float, *, tier: str = "t", now: float = 0.0) -> bool:
    return ring.add(key, key.upper(), tier=tier, duration_s=duration_s, now=now)


def test_the_slowest_of_each_tier_outlive_the_latest() -> None:
    ring: Ring[str] = Ring(recent=2, slowest=1, keep_s=100.0)
    assert add(ring, "slow", 9.0)
    assert add(ring, "other", 1.0, tier="u")
    assert not add(ring, "a", 1.0)
    assert not add(ring, "b", 2.0)
    assert list(ring) == ["B", "A", "OTHER", "SLOW"]
    assert (ring.get("slow"), ring.get("a"), ring.get("nobody")) == ("SLOW", "A", None)
    assert ring.slow() == ["SLOW", "OTHER"]
    assert ring.slow("u") == ["OTHER"]
    assert ring.slow("nobody") == []


def test_a_slower_one_displaces_the_fastest_of_the_slow() -> None:
    ring: Ring[str] = Ring(recent=1, slowest=2, keep_s=100.0)
    for key, duration_s in (("a", 1.0), ("b", 3.0), ("c", 2.0)):
        add(ring, key, duration_s)
    assert ring.slow() == ["B", "C"]


def test_old_slow_ones_make_room_for_faster_ones() -> None:
    ring: Ring[str] = Ring(recent=1, slowest=1, keep_s=10.0)
    add(ring, "a", 9.0, now=0.0)
    assert not add(ring, "b", 1.0, now=9.0)
    assert add(ring, "c", 1.0, now=10.0)
    assert ring.slow() == ["C"]


def test_a_repeated_key_means_the_latest() -> None:
    ring: Ring[str] = Ring(recent=3, slowest=0, keep_s=1.0)
    ring.add("a", "first", tier="t", duration_s=1.0, now=0.0)
    ring.add("a", "second", tier="t", duration_s=1.0, now=0.0)
    assert (ring.get("a"), len(ring)) == ("second", 1)


def test_nothing_makes_it_grow_beyond_its_bounds() -> None:
    ring: Ring[str] = Ring(recent=10, slowest=3, keep_s=5.0)
    rng = random.Random(7)
    for i in range(3000):
        add(ring, f"{rng.random()}", rng.random(), tier=f"t{rng.randrange(40)}", now=float(i) / 10)
    assert len(ring) <= 10 + 3 * Ring.MAX_TIERS
    ring.resize(recent=2, slowest=1, keep_s=5.0)
    assert len(ring) <= 2 + Ring.MAX_TIERS


def test_find_looks_at_the_latest_first() -> None:
    ring: Ring[str] = Ring(recent=3, slowest=3, keep_s=1.0)
    for key in ("aa", "ab", "b"):
        add(ring, key, 1.0)
    assert ring.find(lambda entry: entry.startswith("A")) == "AB"
