"""Notices that a stage has become slower or faster at once: errors of one sign, all too large."""

from collections.abc import Sequence
from operator import mul

JUMP_SAMPLES = 8  # such errors in a row that mean the stage has changed
JUMP_ALIKE = 2.0  # largest over smallest change among them for all terms to change alike


class Jumps:
    """The newest errors beyond `limit`, a share of the prediction, while they share a sign."""

    def __init__(self, limit: float) -> None:
        self._limit = limit
        self._too_slow = False
        self._beyond: list[tuple[list[float], float]] = []  # (raw features, seconds)

    def note(self, error: float, raw: list[float], measured_s: float) -> bool:
        """Whether this error, a share, makes JUMP_SAMPLES of them in a row."""
        too_slow = error > 0.0
        if abs(error) <= self._limit:
            if self._beyond:
                self._beyond.clear()
            return False
        if too_slow != self._too_slow:
            self._beyond.clear()
        self._too_slow = too_slow
        self._beyond.append((raw, measured_s))
        return len(self._beyond) >= JUMP_SAMPLES

    def take(self, terms: Sequence[float]) -> float | None:
        """The factor by which all work changed against `terms`; None if only some of it did.

        Alike over batches of unlike size, the GPU itself is slower or faster. Forgets the errors.
        """
        changes = sorted(s / max(sum(map(mul, raw, terms)), 1e-9) for raw, s in self._beyond)
        bases = [raw[0] for raw, _ in self._beyond]
        self._beyond.clear()
        alike = changes[-1] <= JUMP_ALIKE * changes[0] and max(bases) >= JUMP_ALIKE * min(bases)
        return changes[len(changes) // 2] if alike else None
