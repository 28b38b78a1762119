"""Stage time by tokens alone: straight lines between known sizes, plus the GPU's tile steps."""

from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise
from math import isfinite

SLOWEST_RATE = 0.05  # share of an error a well-known size still takes up; see `learn`


class BaseTable:
    """Never-decreasing seconds over tokens.

    Between two knots the time is interpolated, under the first it is the first's, beyond the last
    it grows in proportion. Every started tile of `tile` tokens adds `tile_s` on top; 0 for none.
    Raises ValueError on unsorted tokens, or seconds that are not above 0 and finite.
    """

    def __init__(
        self,
        tokens: Sequence[int],
        seconds: Sequence[float],
        tile: int = 0,
        tile_s: float = 0.0,
        samples: float = 0.0,
    ) -> None:
        if not tokens or len(tokens) != len(seconds) or tokens[0] < 1:
            raise ValueError(f"a table needs sizes from 1 token up with a time each: {tokens}")
        if any(after <= before for before, after in pairwise(tokens)):
            raise ValueError(f"sizes must be strictly ascending: {tokens}")
        if not all(isfinite(s) and s >= 0.0 for s in (*seconds, tile_s)) or seconds[0] <= 0.0:
            raise ValueError(f"seconds must be finite and above 0: {seconds}, tile {tile_s}")
        self.tokens = list(tokens)
        self.seconds = list(seconds)
        self.tile = tile if tile_s > 0.0 else 0
        self.tile_s = tile_s if tile > 0 else 0.0
        self._samples = [samples] * len(self.tokens)
        self._rise()

    def at(self, num_tokens: int) -> float:
        """Seconds of a micro-batch of `num_tokens`."""
        steps_s = self.tile_s * -(-num_tokens // self.tile) if self.tile else 0.0
        index = bisect_right(self.tokens, num_tokens)
        if index == 0:
            return self.seconds[0] + steps_s
        left, before = self.tokens[index - 1], self.seconds[index - 1]
        if index == len(self.tokens):
            return before * num_tokens / left + steps_s
        part = (num_tokens - left) / (self.tokens[index] - left)
        return before + part * (self.seconds[index] - before) + steps_s

    def learn(self, num_tokens: int, share: float, weight: float) -> None:
        """Move the knots beside `num_tokens` so that its time changes by part of `share`.

        How far is 1/(n + 2) for the n-th sample of a knot, and never less than a slow rate: a
        guessed table settles within tens of samples, a profiled one follows slowly.
        """
        index = bisect_right(self.tokens, num_tokens)
        if index in (0, len(self.tokens)):
            self._move(min(index, len(self.tokens) - 1), 1.0, share, weight)
        else:
            left, right = self.tokens[index - 1], self.tokens[index]
            part = (num_tokens - left) / (right - left)
            norm = part * part + (1.0 - part) * (1.0 - part)
            self._move(index - 1, (1.0 - part) / norm, share, weight)
            self._move(index, part / norm, share, weight)
        self._rise(max(index - 1, 0))

    def _move(self, index: int, near: float, share: float, weight: float) -> None:
        rate = max(SLOWEST_RATE, 1.0 / (self._samples[index] + 2.0)) * weight * near
        self.seconds[index] *= max(1.0 + rate * share, 0.5)
        self._samples[index] += weight * near

    def _rise(self, index: int = 0) -> None:
        """Restore the order around a moved pair of knots, starting from the left one."""
        seconds = self.seconds
        for below in range(index - 1, -1, -1):
            if seconds[below] <= seconds[below + 1]:
                break
            seconds[below] = seconds[below + 1]
        for above in range(index + 1, len(seconds)):
            if seconds[above] < seconds[above - 1]:
                seconds[above] = seconds[above - 1]
            elif above > index + 1:
                break
