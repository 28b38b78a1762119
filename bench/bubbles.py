"""Where pipeline stages idle, and which neighbouring micro-batches made them.

A bubble is time a stage idles while a request is unfinished. Micro-batches are served in order, so
before micro-batch B, which follows A, stage s idles for

    gap_s = max(0, gap_(s-1) + service_(s-1)(B) - service_s(A))

(hand-over times aside). What gap_s inherits keeps the cause it had on stage s-1; what it adds came
about because B took longer upstream than A took here, so it is put down to the pair (A, B). On
stage 0, with all P slots of the pipeline taken, B waits for the oldest micro-batch C to leave the
last stage: the pair is (A, C). A pair is P-P, P-D or D-D as both, one or none of the two carry
prefill. With fewer than P non-empty micro-batches in flight no pair is at fault: there was nothing
to run (ramp-up, drain, empty micro-batches) or the host was late: `starved_s`. Where a gap shrinks
on its way, the imbalance in it is absorbed first. Stages of unequal layers show up as pairs too.
"""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from bench.spans import Span, WorkTime


@dataclass(frozen=True, slots=True)
class Busy:
    """A stage at work on micro-batch `step`, seconds."""

    step: int
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Load:
    """What a micro-batch carried."""

    prefill_tokens: int
    decodes: int


@dataclass(frozen=True, slots=True)
class Bubbles:
    """Idle seconds by cause; add two to sum stages."""

    prefill_prefill_s: float = 0.0
    prefill_decode_s: float = 0.0
    decode_decode_s: float = 0.0
    starved_s: float = 0.0

    @property
    def total_s(self) -> float:
        """All idle seconds."""
        return self.imbalance_s + self.starved_s

    @property
    def imbalance_s(self) -> float:
        """What balancing could win back."""
        return self.prefill_prefill_s + self.prefill_decode_s + self.decode_decode_s

    def __add__(self, other: "Bubbles") -> "Bubbles":
        return Bubbles(
            self.prefill_prefill_s + other.prefill_prefill_s,
            self.prefill_decode_s + other.prefill_decode_s,
            self.decode_decode_s + other.decode_decode_s,
            self.starved_s + other.starved_s,
        )

    def scaled(self, factor: float) -> "Bubbles":
        """Every part times `factor`."""
        return Bubbles(
            self.prefill_prefill_s * factor,
            self.prefill_decode_s * factor,
            self.decode_decode_s * factor,
            self.starved_s * factor,
        )


_NONE = Bubbles()


@dataclass(frozen=True, slots=True)
class StageUse:
    """One stage while work existed: `busy_s` + `bubbles.total_s` = `work_s`."""

    work_s: float
    busy_s: float
    bubbles: Bubbles

    @property
    def busy_share(self) -> float:
        """Share of the time with work in the system that the stage was busy."""
        return self.busy_s / self.work_s if self.work_s else 0.0


def bubble_ratio(stages: Sequence[StageUse]) -> Bubbles:
    """Idle share of stage time while work existed, by cause, over all stages."""
    total = sum((stage.bubbles for stage in stages), Bubbles())
    work_s = sum(stage.work_s for stage in stages)
    return total.scaled(1.0 / work_s) if work_s else total


def stage_use(
    stages: Sequence[Sequence[Busy]], loads: Mapping[int, Load], work: Sequence[Span]
) -> list[StageUse]:
    """Busy time and bubbles of each stage.

    `stages` hold the non-empty micro-batches, the same ones in the same order on every stage;
    `work` are the times from each request's arrival to its last token. Raises ValueError where the
    order differs or services overlap.
    """
    _check(stages)
    has_work = WorkTime(work)
    ends = [busy.end_s for busy in stages[-1]] if stages else []
    uses: list[StageUse] = []
    inherited: list[Bubbles] = []
    for number, rows in enumerate(stages):
        causes: list[Bubbles] = []
        for index, (a, b) in enumerate(pairwise(rows)):
            gap_s = b.start_s - a.end_s
            if gap_s <= 0.0:
                waited = _NONE
            elif number == 0:
                waited = _first_stage(index, gap_s, stages, ends, loads)
            else:
                waited = _later_stage(inherited[index], gap_s, loads[a.step], loads[b.step])
            causes.append(waited)
        uses.append(_use(rows, causes, has_work))
        inherited = causes
    return uses


def _check(stages: Sequence[Sequence[Busy]]) -> None:
    for number, rows in enumerate(stages):
        if [busy.step for busy in rows] != [busy.step for busy in stages[0]]:
            raise ValueError(f"stage {number}: must serve the micro-batches of stage 0 in order")
        for a, b in pairwise(rows):
            if b.start_s < a.end_s:
                raise ValueError(f"stage {number}: step {b.step} starts before step {a.step} ends")


def _pair(a: Load, b: Load, seconds: float) -> Bubbles:
    prefills = (a.prefill_tokens > 0) + (b.prefill_tokens > 0)
    if prefills == 2:
        return Bubbles(prefill_prefill_s=seconds)
    if prefills == 1:
        return Bubbles(prefill_decode_s=seconds)
    return Bubbles(decode_decode_s=seconds)


def _first_stage(
    index: int,
    gap_s: float,
    stages: Sequence[Sequence[Busy]],
    ends: Sequence[float],
    loads: Mapping[int, Load],
) -> Bubbles:
    a = stages[0][index]
    done = bisect_right(ends, a.end_s)
    in_flight = index + 1 - done
    if in_flight < len(stages):
        return Bubbles(starved_s=gap_s)
    # The completion that leaves fewer than P in flight frees B's slot.
    freed = done + in_flight - len(stages)
    waited_s = min(ends[freed] - a.end_s, gap_s)
    cause = _pair(loads[a.step], loads[stages[-1][freed].step], waited_s)
    return cause + Bubbles(starved_s=gap_s - waited_s)


def _later_stage(before: Bubbles, gap_s: float, a: Load, b: Load) -> Bubbles:
    if gap_s >= before.total_s:
        return before + _pair(a, b, gap_s - before.total_s)
    starved_s = min(before.starved_s, gap_s)
    return _imbalance(before, gap_s - starved_s) + Bubbles(starved_s=starved_s)


def _imbalance(bubbles: Bubbles, seconds: float) -> Bubbles:
    """The imbalance in `bubbles`, scaled to `seconds`."""
    if bubbles.imbalance_s <= 0.0:
        return Bubbles()
    pairs = bubbles + Bubbles(starved_s=-bubbles.starved_s)
    return pairs.scaled(seconds / bubbles.imbalance_s)


def _use(rows: Sequence[Busy], causes: Sequence[Bubbles], work: WorkTime) -> StageUse:
    busy_s = sum(work.within(busy.start_s, busy.end_s) for busy in rows)
    bubbles = Bubbles()
    for (a, b), cause in zip(pairwise(rows), causes, strict=True):
        if cause is _NONE:
            continue
        idle_s = work.within(a.end_s, b.start_s)
        pairs = _imbalance(cause, min(cause.imbalance_s, idle_s))
        bubbles += pairs + Bubbles(starved_s=idle_s - pairs.imbalance_s)
    if rows:
        ramp_s = work.until(rows[0].start_s) + work.total_s - work.until(rows[-1].end_s)
    else:
        ramp_s = work.total_s
    return StageUse(work.total_s, busy_s, bubbles + Bubbles(starved_s=ramp_s))


@dataclass(frozen=True, slots=True)
class Spread:
    """Decodes per micro-batch over P consecutive steps, means over all such windows."""

    relative_std: float  # population standard deviation / mean
    max_minus_min: float


def decode_spread(decodes: Sequence[int], pp_size: int) -> Spread:
    """Spread over sliding windows of `pp_size` steps, empty micro-batches counted as 0.

    Windows without any decode are left out; without windows the spread is 0.
    """
    if len(decodes) < pp_size:
        return Spread(0.0, 0.0)
    windows = np.lib.stride_tricks.sliding_window_view(np.array(decodes), pp_size)
    windows = windows[windows.any(axis=1)]
    if not len(windows):
        return Spread(0.0, 0.0)
    return Spread(
        float((windows.std(axis=1) / windows.mean(axis=1)).mean()),
        float(np.ptp(windows, axis=1).mean()),
    )
