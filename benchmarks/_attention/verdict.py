"""From paired samples to a ratio, its interval and a verdict. Pure functions: no clock, no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

__all__ = [
    "CONFIDENCE",
    "FEWEST_PAIRS",
    "RESOLUTION",
    "WIDEST",
    "Pair",
    "Phases",
    "Ratio",
    "Verdict",
    "change_of",
    "pooled_ratio_of",
    "ratio_of",
    "spread_of",
    "strict_confidence",
    "verdict_of",
]

Verdict = Literal["unchanged", "slower", "faster", "too noisy"]

Pair = tuple[float, float]
"""Seconds a call of the first (unguarded) and of the second (guarded) process, taken one right after the other."""

Phases = Sequence[Sequence[Pair]]
"""The pairs of each phase. Between phases the two processes change roles, so that what tells one process from
the other (where its memory lies, which core it prefers) enters one phase upwards and the next downwards."""

WIDEST = 0.02
"""An interval wider than this cannot support "unchanged"."""

RESOLUTION = 0.005
"""A difference below this is not called one: two processes with the same code differ by as much."""

FEWEST_PAIRS = 10
"""In each phase. Resampling fewer than this would claim a certainty that is not there."""

CONFIDENCE = 0.95
"""Of the interval that is shown."""


@dataclass(frozen=True)
class Ratio:
    """Second over first: above 1, the second process is slower.

    ``low`` to ``high`` is the confidence interval, ``phases`` the ratio in each phase by itself.
    """

    estimate: float
    low: float
    high: float
    phases: tuple[float, ...] = ()

    @property
    def width(self) -> float:
        """Of the interval."""
        return self.high - self.low


def ratio_of(phases: Phases, *, confidence: float = CONFIDENCE, resamples: int = 4000, seed: int = 0) -> Ratio:
    """The ratio of two processes: in each phase the median of the pairs' ratios, of the phases the geometric mean.

    The interval is a percentile bootstrap that resamples pairs within each phase. Where a phase has fewer than
    `FEWEST_PAIRS` pairs, it is 0 to infinity.

    Raises:
        ValueError: there is no pair, or a time is not positive.
    """
    return pooled_ratio_of([phases], confidence=confidence, resamples=resamples, seed=seed)


def pooled_ratio_of(
    several: Sequence[Phases], *, confidence: float = CONFIDENCE, resamples: int = 4000, seed: int = 0
) -> Ratio:
    """The geometric mean of several cases' ratios; otherwise as `ratio_of`."""
    logs = [[_logs(pairs) for pairs in phases] for phases in several]
    flat = [pairs for phases in logs for pairs in phases]
    count = min((len(phases) for phases in logs), default=0)
    if not flat or not all(map(len, flat)):
        raise ValueError("a ratio needs at least one pair in each phase")
    estimate = float(np.exp(np.mean([np.median(pairs) for pairs in flat])))
    by_phase = tuple(float(np.exp(np.mean([np.median(phases[i]) for phases in logs]))) for i in range(count))
    if min(map(len, flat)) < FEWEST_PAIRS:
        return Ratio(estimate, 0.0, float("inf"), by_phase)
    rng = np.random.default_rng(seed)
    drawn = np.mean([_medians(pairs, resamples, rng) for pairs in flat], axis=0)
    return Ratio(estimate, *_interval(np.exp(drawn), confidence), by_phase)


def change_of(
    before: Sequence[float],
    after: Sequence[float],
    *,
    confidence: float = CONFIDENCE,
    resamples: int = 4000,
    seed: int = 0,
) -> Ratio:
    """Median time ``after`` over median time ``before``, of two runs that were not interleaved.

    Raises:
        ValueError: a run has no time, or one that is not positive.
    """
    first, second = _logs_of(before), _logs_of(after)
    estimate = float(np.exp(np.median(second) - np.median(first)))
    if min(len(first), len(second)) < FEWEST_PAIRS:
        return Ratio(estimate, 0.0, float("inf"))
    rng = np.random.default_rng(seed)
    drawn = np.exp(_medians(second, resamples, rng) - _medians(first, resamples, rng))
    return Ratio(estimate, *_interval(drawn, confidence))


def strict_confidence(rows: int) -> float:
    """The confidence for calling one of ``rows`` rows slower or faster: 5 % that any of them is called in error."""
    return 1 - (1 - CONFIDENCE) / max(1, rows)


def verdict_of(
    shown: Ratio, strict: Ratio | None = None, *, widest: float = WIDEST, resolution: float = RESOLUTION
) -> Verdict:
    """What the intervals support.

    Args:
        shown: with the interval of `CONFIDENCE`.
        strict: of the same samples, with the interval of `strict_confidence`; ``shown``, when None.
        widest: see `WIDEST`.
        resolution: see `RESOLUTION`.

    Returns:
        ``slower`` or ``faster`` if the whole strict interval lies beyond 1 by more than ``resolution``, however
        wide it is, and each phase by itself is on that side too: what holds in one phase alone belongs to a
        process, not to its role. Otherwise ``unchanged`` if the shown interval is at most ``widest`` and has a value within
        ``resolution`` of 1; else ``too noisy``.
    """
    strict = strict or shown
    if strict.low > 1 + resolution and all(ratio > 1 for ratio in shown.phases):
        return "slower"
    if strict.high < 1 - resolution and all(ratio < 1 for ratio in shown.phases):
        return "faster"
    near = shown.low <= 1 + resolution and shown.high >= 1 - resolution
    return "unchanged" if near and shown.width <= widest else "too noisy"


def spread_of(times: Sequence[float]) -> tuple[float, float]:
    """Median, and distance between the quartiles as a share of it."""
    low, middle, high = np.percentile(np.asarray(times, dtype=float), [25, 50, 75])
    return float(middle), float((high - low) / middle)


def _logs(pairs: Sequence[Pair]) -> npt.NDArray[Any]:
    return (
        _logs_of([second for _, second in pairs]) - _logs_of([first for first, _ in pairs]) if pairs else np.array([])
    )


def _logs_of(times: Sequence[float]) -> npt.NDArray[Any]:
    values = np.asarray(times, dtype=float)
    if not values.size or not (values > 0).all():
        raise ValueError("times must be positive, and there must be one at least")
    logs: npt.NDArray[Any] = np.log(values)
    return logs


def _medians(values: npt.NDArray[Any], resamples: int, rng: np.random.Generator) -> npt.NDArray[Any]:
    drawn = values[rng.integers(0, len(values), (resamples, len(values)))]
    medians: npt.NDArray[Any] = np.median(drawn, axis=1)
    return medians


def _interval(drawn: npt.NDArray[Any], confidence: float) -> tuple[float, float]:
    tail = (1 - confidence) / 2
    low, high = np.quantile(drawn, [tail, 1 - tail])
    return float(low), float(high)
