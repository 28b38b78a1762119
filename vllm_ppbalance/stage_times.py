"""Stage times from what a scheduler sees: when a micro-batch was submitted and when it was done."""

from math import inf

ALIKE = 1.02  # batches alike reach all stages just in time: noise decides which bound is least


class StageTimes:
    """Infers each micro-batch's time on a stage of a pipeline of `pp_size` like stages.

    A batch leaves stage s at max(when the one before left s, when it left s - 1 itself) + t. So it
    is done at the largest of pp_size + 1 sums that each rise with t, and t is the smallest of as
    many quotients. With unequal batches in flight t is not the gap between two completions: that
    holds the time the last stage waited for this batch, too.
    """

    def __init__(self, pp_size: int) -> None:
        self._left = [-inf] * pp_size  # when the batch before left each stage

    def completed(self, submitted_s: float, completed_s: float) -> tuple[float, bool]:
        """(seconds on a stage, whether it is the gap since the last completion) of the next batch.

        Call it for non-empty batches in order. Both times are on one clock; the seconds may be 0
        or less when the clock or the order is off.
        """
        stages = len(self._left)
        bounds = [
            (completed_s - left_s) / (stages - stage) for stage, left_s in enumerate(self._left)
        ]
        seconds = min((completed_s - submitted_s) / stages, *bounds)
        by_gap = bounds[-1] <= seconds * ALIKE
        at = submitted_s
        for stage, left_s in enumerate(self._left):
            at = max(at, left_s) + max(seconds, 0.0)
            self._left[stage] = at
        return seconds, by_gap
