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

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from bench.spans import Span, WorkTime

Floats = np.ndarray[Any, Any]


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
    starts = np.array([[busy.start_s for busy in rows] for rows in stages])
    ends = np.array([[busy.end_s for busy in rows] for rows in stages])
    if not starts.size:
        idle = Bubbles(starved_s=has_work.total_s)
        return [StageUse(has_work.total_s, 0.0, idle) for _ in stages]
    prefills = np.array([loads[busy.step].prefill_tokens > 0 for busy in stages[0]], dtype=int)
    gaps = starts[:, 1:] - ends[:, :-1]
    neighbours = prefills[:-1] + prefills[1:]
    uses: list[StageUse] = []
    causes = _first_stage(gaps[0], ends[0], ends[-1], prefills, len(stages))
    for number in range(len(stages)):
        if number:
            causes = _later_stage(causes, gaps[number], neighbours)
        uses.append(_use(starts[number], ends[number], causes, has_work))
    return uses


def _check(stages: Sequence[Sequence[Busy]]) -> None:
    for number, rows in enumerate(stages):
        if [busy.step for busy in rows] != [busy.step for busy in stages[0]]:
            raise ValueError(f"stage {number}: must serve the micro-batches of stage 0 in order")
        for a, b in pairwise(rows):
            if b.start_s < a.end_s:
                raise ValueError(f"stage {number}: step {b.step} starts before step {a.step} ends")


# Causes are arrays with a row a gap and a column a field of `Bubbles`: for two, one or no
# micro-batches of a pair that carry prefill, and for starved.
_STARVED = 3


def _add_pairs(causes: Floats, prefills: Floats, seconds: Floats) -> None:
    causes[np.arange(len(causes)), 2 - prefills] += seconds


def _first_stage(
    gaps: Floats, ends: Floats, last_ends: Floats, prefills: Floats, num_stages: int
) -> Floats:
    causes = np.zeros((len(gaps), 4))
    before = np.arange(1, len(gaps) + 1)
    in_flight = before - np.searchsorted(last_ends, ends[:-1], side="right")
    # The completion that leaves fewer than P in flight frees B's slot.
    freed = np.maximum(before - num_stages, 0)
    waited = np.minimum(last_ends[freed] - ends[:-1], gaps)
    waited = np.where(in_flight >= num_stages, waited, 0.0)
    _add_pairs(causes, prefills[:-1] + prefills[freed], waited)
    causes[:, _STARVED] = gaps - waited
    return causes


def _later_stage(before: Floats, gaps: Floats, neighbours: Floats) -> Floats:
    added = gaps - before.sum(axis=1)
    grown = before.copy()
    _add_pairs(grown, neighbours, added)
    shrunk = _with_imbalance(before, gaps - np.minimum(before[:, _STARVED], gaps))
    shrunk[:, _STARVED] = np.minimum(before[:, _STARVED], gaps)
    return np.where((added >= 0.0)[:, None], grown, shrunk)


def _with_imbalance(causes: Floats, seconds: Floats) -> Floats:
    """The imbalance in each row scaled to `seconds`, starved 0."""
    imbalance = causes[:, :_STARVED].sum(axis=1)
    scale = np.divide(seconds, imbalance, out=np.zeros(len(causes)), where=imbalance > 0.0)
    scaled: Floats = causes * scale[:, None]
    scaled[:, _STARVED] = 0.0
    return scaled


def _use(starts: Floats, ends: Floats, causes: Floats, work: WorkTime) -> StageUse:
    busy_s = float(work.within_each(starts, ends).sum())
    idle = work.within_each(ends[:-1], starts[1:])
    pairs = _with_imbalance(causes, np.minimum(causes[:, :_STARVED].sum(axis=1), idle))
    starved_s = float((idle - pairs.sum(axis=1)).sum())
    ramp_s = work.until(float(starts[0])) + work.total_s - work.until(float(ends[-1]))
    both, one, none = map(float, pairs.sum(axis=0)[:_STARVED])
    return StageUse(work.total_s, busy_s, Bubbles(both, one, none, starved_s + ramp_s))


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
