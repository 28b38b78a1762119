"""When one stage is done with a micro-batch, by deadlines: late wake-ups do not add up.

vLLM-free. A chain of these says what `bench.pipeline.Pipeline` says (a test holds them together).
"""

import time
from typing import NamedTuple

from bench.batch import BatchShape
from bench.pipeline import Activations, Link, StageTime


class Span(NamedTuple):
    """A stage's work on one micro-batch, seconds on the monotonic clock of the machine."""

    start_s: float
    end_s: float
    arrives_s: float  # when the next stage has its activations


class StageTimeline:
    """One stage and the link to the next: what takes when, given when its input is there."""

    def __init__(
        self,
        stage_time: StageTime,
        link: Link | None = None,
        activations: Activations | None = None,
    ) -> None:
        if (link is None) != (activations is None):
            raise ValueError("a link needs activations to know the bytes of a transfer")
        self._stage_time = stage_time
        self._link = link
        self._activations = activations
        self._free_s = 0.0
        self._link_free_s = 0.0

    def run(self, shape: BatchShape, ready_s: float) -> Span:
        """The span of a micro-batch whose input is there at `ready_s`; one call each, in order."""
        start_s = max(ready_s, self._free_s)
        self._free_s = end_s = start_s + self._stage_time(shape)
        if self._link is None or self._activations is None:
            return Span(start_s, end_s, end_s)
        num_bytes = self._activations.num_bytes(shape.num_tokens)
        sent_s = max(end_s, self._link_free_s) + num_bytes / self._link.bandwidth_bytes_s
        self._link_free_s = sent_s
        return Span(start_s, end_s, sent_s + self._link.latency_s)


def sleep_until(deadline_s: float) -> None:
    """Returns at `deadline_s` of the monotonic clock, at once if that has passed."""
    remaining_s = deadline_s - time.monotonic()
    if remaining_s > 0.0:
        time.sleep(remaining_s)
