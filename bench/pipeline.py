"""Pipeline stages as FIFO servers joined by links, in virtual time.

Batches keep the order they are submitted in, in every stage and on every link: that order is the
tie-break, so a run is a fold over its submissions and repeats to the bit.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from bench.batch import BatchShape

StageTime = Callable[[BatchShape], float]


@dataclass(frozen=True, slots=True)
class Link:
    """What joins two stages. A transfer holds the link for bytes / bandwidth, then travels."""

    bandwidth_bytes_s: float
    latency_s: float

    def __post_init__(self) -> None:
        if self.bandwidth_bytes_s <= 0 or self.latency_s < 0:
            raise ValueError(f"a link needs bandwidth > 0 and latency >= 0, got {self}")


# Bandwidths in one direction as a large NCCL send reaches them, about 80 % of the wire.
LINKS = {
    "nvlink": Link(bandwidth_bytes_s=360e9, latency_s=10e-6),
    "pcie5": Link(bandwidth_bytes_s=50e9, latency_s=15e-6),
    "pcie4": Link(bandwidth_bytes_s=25e9, latency_s=15e-6),
    "net100g": Link(bandwidth_bytes_s=10e9, latency_s=40e-6),
}


@dataclass(frozen=True, slots=True)
class Activations:
    """What a stage sends on per token: hidden states and residual, hence two tensors."""

    hidden_size: int
    bytes_per_element: int = 2
    tensors: int = 2

    def num_bytes(self, num_tokens: int) -> int:
        """Bytes that `num_tokens` tokens put on the link."""
        return num_tokens * self.hidden_size * self.bytes_per_element * self.tensors


class Interval(NamedTuple):
    """A stage busy with micro-batch `step`, in seconds."""

    step: int
    start_s: float
    end_s: float


class Pipeline:
    """A tandem queue: `submit` gives at once the time at which the last stage is done.

    `stages` are the seconds a stage computes for a batch. `links` is one for all hops, one a hop,
    or None for instant hops. `noise` is the standard deviation of the logarithm of a factor on
    each stage time, drawn with `seed`.
    """

    def __init__(
        self,
        stages: Sequence[StageTime],
        *,
        links: Link | Sequence[Link] | None = None,
        activations: Activations | None = None,
        noise: float = 0.0,
        seed: int = 0,
    ) -> None:
        if not stages:
            raise ValueError("a pipeline needs at least one stage")
        if noise < 0:
            raise ValueError(f"noise must be >= 0, got {noise}")
        hops = len(stages) - 1
        self._links = [links] * hops if isinstance(links, Link) else list(links or ())
        if self._links and activations is None:
            raise ValueError("links need activations to know the bytes of a transfer")
        if links is not None and len(self._links) != hops:
            raise ValueError(f"{len(stages)} stages need {hops} links, got {len(self._links)}")
        self._stages = tuple(stages)
        self._activations = activations
        self._noise = noise
        self._random = random.Random(seed)
        self._stage_free_s = [0.0] * len(stages)
        self._link_free_s = [0.0] * hops
        self.intervals: list[list[Interval]] = [[] for _ in stages]

    @property
    def num_stages(self) -> int:
        """Stages, the pipeline-parallel size."""
        return len(self._stages)

    def submit(
        self, step: int, shape: BatchShape, ready_s: float, tokens_ready_s: float = 0.0
    ) -> float:
        """Send a batch through all stages; returns when it leaves the last one, in seconds.

        It enters the first stage at `ready_s` or later, and not before `tokens_ready_s`, when the
        tokens it feeds on have been sampled (asynchronous scheduling runs ahead of them). An
        empty batch costs no time but keeps its place in the order.
        """
        num_tokens = shape.num_tokens
        if not num_tokens:
            for index, free_s in enumerate(self._stage_free_s):
                ready_s = self._stage_free_s[index] = max(ready_s, free_s)
            return ready_s
        at_s = max(ready_s, tokens_ready_s)
        for index, stage_time in enumerate(self._stages):
            start_s = max(at_s, self._stage_free_s[index])
            at_s = start_s + self._seconds(stage_time, shape)
            self._stage_free_s[index] = at_s
            self.intervals[index].append(Interval(step, start_s, at_s))
            at_s = self._transfer(index, num_tokens, at_s)
        return at_s

    def hold_last_stage(self, until_s: float) -> None:
        """The last stage waits until `until_s`: its sampling needs something from the host."""
        self._stage_free_s[-1] = max(self._stage_free_s[-1], until_s)

    def _seconds(self, stage_time: StageTime, shape: BatchShape) -> float:
        seconds = stage_time(shape)
        if self._noise:
            seconds *= self._random.lognormvariate(0.0, self._noise)
        if seconds < 0:
            raise ValueError(f"a stage time must be >= 0 s, got {seconds} for {shape}")
        return seconds

    def _transfer(self, hop: int, num_tokens: int, at_s: float) -> float:
        if hop >= len(self._links) or self._activations is None:
            return at_s
        link = self._links[hop]
        start_s = max(at_s, self._link_free_s[hop])
        num_bytes = self._activations.num_bytes(num_tokens)
        self._link_free_s[hop] = start_s + num_bytes / link.bandwidth_bytes_s
        return self._link_free_s[hop] + link.latency_s
