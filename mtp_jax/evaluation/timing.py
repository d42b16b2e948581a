"""Timing programs against each other in one process.

A machine that others use, or that warms up, drifts by more than the differences that matter. So every program runs once
before the clock starts, then all take turns, round after round, every second round backwards; and what is compared is
compared within a round, where both ran under like conditions: a ratio is the median of the rounds' ratios.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import jax

Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True)
class Timed:
    """A program to time."""

    prepare: Callable[[], Any]  # makes what `run` may use up; not timed
    run: Callable[[Any], Any]  # gives arrays, or something without any when it is done on return
    count: int = 1  # passes in one run


def take_turns(programs: Mapping[Key, Timed], rounds: int, progress: Callable[[int, int], None] = lambda done, total: None) -> dict[Key, list[float]]:
    """Seconds of one pass of each program, round by round.

    Args:
      programs: what to time.
      rounds: at least 1.
      progress: called with (runs done, runs in all); the first ones compile.
    """
    seconds: dict[Key, list[float]] = {key: [] for key in programs}
    total = len(programs) * (rounds + 1)
    for done, timed in enumerate(programs.values(), 1):
        _once(timed)
        progress(done, total)
    for number in range(rounds):
        for place, key in enumerate(list(programs)[:: -1 if number % 2 else 1], 1):
            seconds[key].append(_once(programs[key]))
            progress((number + 1) * len(programs) + place, total)
    return seconds


def milliseconds(seconds: Sequence[float]) -> float:
    """Median of the rounds."""
    return round(statistics.median(seconds) * 1e3, 4)


def ratio(seconds: Sequence[float], unit: Sequence[float]) -> float:
    """Median over the rounds of seconds / unit."""
    return round(statistics.median(one / other for one, other in zip(seconds, unit, strict=True)), 4)


def _once(timed: Timed) -> float:
    given = jax.block_until_ready(timed.prepare())
    start = time.perf_counter()
    jax.block_until_ready(timed.run(given))
    return (time.perf_counter() - start) / timed.count
