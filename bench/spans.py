"""Spans of time: when any request was unfinished."""

from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

Floats = np.ndarray[Any, Any]

Span = tuple[float, float]


def union(spans: Sequence[Span]) -> list[Span]:
    """Disjoint ascending spans that cover the same time; a request is (arrival, last token)."""
    merged: list[Span] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


class WorkTime:
    """Seconds with work in any span of time, by prefix sums."""

    def __init__(self, spans: Sequence[Span]) -> None:
        self._spans = union(spans)
        self._starts = [start for start, _ in self._spans]
        self._before = [0.0]
        for start, end in self._spans:
            self._before.append(self._before[-1] + end - start)

    def until(self, time_s: float) -> float:
        """Seconds with work before `time_s`."""
        index = bisect_right(self._starts, time_s)
        if index == 0:
            return 0.0
        start, end = self._spans[index - 1]
        return self._before[index - 1] + min(time_s, end) - start

    def within(self, start_s: float, end_s: float) -> float:
        """Seconds with work between the two."""
        return max(self.until(end_s) - self.until(start_s), 0.0)

    def within_each(self, starts_s: Floats, ends_s: Floats) -> Floats:
        """`within` for arrays of starts and ends."""
        knots = [time_s for span in self._spans for time_s in span]
        seconds = [value for pair in pairwise(self._before) for value in pair]
        if not knots:
            return np.zeros(len(starts_s))
        spent = np.interp(ends_s, knots, seconds) - np.interp(starts_s, knots, seconds)
        return np.maximum(spent, 0.0)

    @property
    def total_s(self) -> float:
        """All seconds with work."""
        return self._before[-1]
