"""When requests arrive: seeded processes and replay of a trace's own times, in seconds.

All draw from `numpy.random.RandomState`, whose stream numpy keeps the same for ever.
"""

from collections.abc import Sequence

import numpy as np


def _positive(name: str, value: float) -> float:
    if not value > 0.0:
        raise ValueError(f"{name} = {value}: must be above 0")
    return value


def poisson(rate: float, count: int, seed: int) -> list[float]:
    """`count` arrivals at `rate` a second, exponential gaps."""
    scale = 1.0 / _positive("rate", rate)
    gaps = np.random.RandomState(seed).exponential(scale, count)
    return [float(t) for t in gaps.cumsum()]


def gamma(rate: float, count: int, cv: float, seed: int) -> list[float]:
    """Gamma gaps whose standard deviation is `cv` times their mean: above 1 means bursts."""
    _positive("rate", rate)
    shape = 1.0 / _positive("cv", cv) ** 2
    gaps = np.random.RandomState(seed).gamma(shape, 1.0 / (rate * shape), count)
    return [float(t) for t in gaps.cumsum()]


def constant(rate: float, count: int) -> list[float]:
    """One request every 1/rate seconds, the first after one gap."""
    _positive("rate", rate)
    return [(index + 1) / rate for index in range(count)]


def replay(
    times_s: Sequence[float],
    window: tuple[float, float] | None = None,
    speed: float = 1.0,
    sample_ratio: float = 1.0,
    seed: int = 0,
) -> list[tuple[int, float]]:
    """(row, arrival) of the trace rows to send, in order of arrival.

    `window` is [start, end) in the trace's own seconds; its start becomes 0. `speed` 0.9 slows down
    (gaps are divided by it). Each row is kept with probability `sample_ratio`.
    """
    _positive("speed", speed)
    if not 0.0 < sample_ratio <= 1.0:
        raise ValueError(f"sample_ratio = {sample_ratio}: must be above 0 and at most 1")
    start, end = window if window is not None else (0.0, float("inf"))
    if not 0.0 <= start < end:
        raise ValueError(f"window = {start} {end}: must start at 0 or later and end after that")
    kept = np.random.RandomState(seed).random_sample(len(times_s)) < sample_ratio
    rows = [
        (row, (time_s - start) / speed)
        for row, time_s in enumerate(times_s)
        if start <= time_s < end and kept[row]
    ]
    return sorted(rows, key=lambda pair: pair[1])
