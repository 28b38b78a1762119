"""Where the stages idle, estimated while serving from submit times, completions and stage times.

The same account as the simulator's `bench.bubbles`, for a pipeline of like stages: an idle gap is
put down to the two micro-batches beside it, by whether both, one or none of them carry prefill.
"""

from collections import deque

CAUSES = ("prefill_prefill", "prefill_decode", "decode_decode", "starved")
_STARVED = 3


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
        stage_s = max(stage_s, 0.0)
        recent = self._recent
        if not recent or start_s >= recent[-1][0]:
            self._drain(start_s)
        self._first_stage(start_s, stage_s, prefill)
        recent.append((done_s, prefill))

    def _drain(self, start_s: float) -> None:
        if self._recent:
            last_s = self._recent[-1][0]
            drained = sum(max(last_s - left_s, 0.0) for left_s in self.left_s)
            self.idle_s[_STARVED] += drained
            self.work_s += drained
        self.left_s = [start_s] * len(self.left_s)
        self._recent.clear()

    def _first_stage(self, start_s: float, stage_s: float, prefill: bool) -> None:
        left, recent = self.left_s, self._recent
        gap = max(start_s - left[0], 0.0)
        causes = [0.0] * len(CAUSES)
        if gap and len(recent) == len(left):
            # All slots were taken: the stage waited for the oldest micro-batch to leave the last.
            waited = min(max(recent[0][0] - left[0], 0.0), gap)
            causes[2 - recent[-1][1] - recent[0][1]] = waited
            causes[_STARVED] = gap - waited
        else:
            causes[_STARVED] = gap
        pair = 2 - recent[-1][1] - prefill if recent else _STARVED
        self._note(causes, gap + stage_s)
        at = left[0] = left[0] + gap + stage_s
        for stage in range(1, len(left)):
            before, gap = gap, max(at - left[stage], 0.0)
            if gap >= before:
                causes[pair] += gap - before
            else:
                _absorb(causes, gap)
            self._note(causes, gap + stage_s)
            at = left[stage] = left[stage] + gap + stage_s

    def _note(self, causes: list[float], seconds: float) -> None:
        idle = self.idle_s
        for index, cause_s in enumerate(causes):
            idle[index] += cause_s
        self.work_s += seconds


def _absorb(causes: list[float], gap: float) -> None:
    """Shrink to `gap` seconds, what imbalance brought first."""
    starved = min(causes[_STARVED], gap)
    imbalance = sum(causes[:_STARVED])
    scale = (gap - starved) / imbalance if imbalance > 0.0 else 0.0
    for index in range(_STARVED):
        causes[index] *= scale
    causes[_STARVED] = starved
