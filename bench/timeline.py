"""What the stages' pictures show: who was at work when, on what, whether simulated or real."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bench.batch import BatchShape
from bench.bubbles import Busy

if TYPE_CHECKING:
    from bench.simulate import Outcome


@dataclass(frozen=True, slots=True)
class Timeline:
    """Seconds on one clock. `stages` are rows of work, `shapes` say by step what it was.

    `rows` are the request ids by step where they are known; `counters` are (time, name -> value).
    """

    title: str
    stages: Sequence[Sequence[Busy]]
    shapes: Mapping[int, BatchShape]
    bubble_ratio: float
    middle_s: float
    counters: Sequence[tuple[float, Mapping[str, float]]] = ()
    rows: Sequence[Sequence[str]] = ()


def of_run(outcome: Outcome) -> Timeline:
    """The timeline of a simulated run."""
    steps = outcome.run.steps
    arrivals = [record.arrival_s for record in outcome.records]
    return Timeline(
        outcome.spec.policy.name,
        outcome.stages,
        {index: step.shape for index, step in enumerate(steps)},
        outcome.result["pipeline"]["bubble_ratio"],
        (min(arrivals) + max(arrivals)) / 2.0,
        [(step.schedule_s, {"running": step.running, "waiting": step.waiting}) for step in steps],
        outcome.rows,
    )
