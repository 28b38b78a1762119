"""Where the stages idle, estimated while serving from submit times, completions and stage times.

The same account as the simulator's `bench.bubbles`, for a pipeline of like stages: an idle gap is
put down to the two micro-batches beside it, by whether both, one or none of them carry prefill.
"""

from collections import deque

CAUSES = ("prefill_prefill", "prefill_decode", "decode_decode", "starved")
_STARVED = 3
_ALL = range(len(CAUSES))


class BubbleEstimate:
    """Sums since the start, in seconds of stages: `idle_s` by CAUSES, `work_s` of it all.

    `left_s` says when the latest micro-batch left each stage. Stages count as at work from the
    submission of a micro-batch to an empty pipeline until the pipeline is empty again.
    """

    def __init__(self, pp_size: int) -> None:
        self.idle_s = [0.0] * len(CAUSES)
        self.work_s = 0.0
        self.left_s = [0.0] * pp_size
        # (done, carries prefill) of the newest micro-batches, oldest first.
        self._recent: deque[tuple[float, bool]] = deque(maxlen=pp_size)

    def completed(self, start_s: float, stage_s: float, done_s: float, prefill: bool) -> None:
        """Account for the next non-empty micro-batch, in the order they are submitted.

        It could start at `start_s`, took `stage_s` on each stage, and was done at `done_s`.
        """
        if stage_s < 0.0:
            stage_s = 0.0
        recent, left, idle = self._recent, self.left_s, self.idle_s
        if not recent or start_s >= recent[-1][0]:
            self._drain(start_s)
            pair = _STARVED
        else:
            pair = 2 - recent[-1][1] - prefill
        causes, before = self._first_gap(start_s)
        recent.append((done_s, prefill))
        at, idle_s = left[0] + before + stage_s, before
        left[0] = at
        sums = list(causes)
        for stage in range(1, len(left)):
            gap = at - left[stage]
            if gap <= 0.0:
                gap, at = 0.0, left[stage]
            if gap < before:
                _absorb(causes, gap)
            else:
                causes[pair] += gap - before
            for index in _ALL:
                sums[index] += causes[index]
            idle_s += gap
            before = gap
            at += stage_s
            left[stage] = at
        for index in _ALL:
            idle[index] += sums[index]
        self.work_s += idle_s + stage_s * len(left)

    def _drain(self, start_s: float) -> None:
        """The pipeline was empty when a micro-batch came at `start_s`: all stages begin anew."""
        left = self.left_s
        if self._recent:
            last_s = self._recent[-1][0]
            drained = sum(max(last_s - left_s, 0.0) for left_s in left)
            self.idle_s[_STARVED] += drained
            self.work_s += drained
            self._recent.clear()
        left[:] = [start_s] * len(left)

    def _first_gap(self, start_s: float) -> tuple[list[float], float]:
        """How long the first stage waits for its next micro-batch, by cause and in all."""
        gap = start_s - self.left_s[0]
        if gap <= 0.0:
            return [0.0, 0.0, 0.0, 0.0], 0.0
        recent, causes = self._recent, [0.0, 0.0, 0.0, gap]
        if len(recent) == len(self.left_s):
            # All slots were taken: the stage waited for the oldest micro-batch to leave the last.
            waited = min(max(recent[0][0] - self.left_s[0], 0.0), gap)
            causes[2 - recent[-1][1] - recent[0][1]] = waited
            causes[_STARVED] = gap - waited
        return causes, gap


def _absorb(causes: list[float], gap: float) -> None:
    """Shrink to `gap` seconds, what imbalance brought first."""
    both, one, none, starved = causes
    starved = min(starved, gap)
    imbalance = both + one + none
    scale = (gap - starved) / imbalance if imbalance > 0.0 else 0.0
    causes[:] = both * scale, one * scale, none * scale, starved
