"""What real step logs exceed a latency profile by: alone in the pipeline, and one after another."""

import gzip
import json
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median

from bench.batch import BatchShape

Lengths = Sequence[tuple[int, int]]
StageTime = Callable[[BatchShape], float]
CLASSES = (1, 130, 200, 257, 350, 450, 513, 1100, 2049, 1 << 20)  # lower ends, tokens
SMALL_TOKENS = 200
LARGE_TOKENS = 400
MIN_STEPS = 5


@dataclass(frozen=True, slots=True)
class LoggedStep:
    """A completed step: what it carried, when it was scheduled and done, seconds."""

    shape: BatchShape
    schedule_s: float
    done_s: float


@dataclass(frozen=True, slots=True)
class Excess:
    """Steps of one class of sizes: medians of the profile's seconds and of what they took more."""

    low: int
    high: int
    steps: int
    profile_s: float
    excess_s: float


def read_log(path: Path, lengths: Lengths) -> list[LoggedStep]:
    """The steps of a log in the order they were done.

    The log holds token counts only. Prompts are computed first come first served, so the chunks
    follow from `lengths`, (prompt, output) in order of arrival; every decode is taken to read the
    mean context of a decode.
    """
    weighted = sum((prompt + output / 2.0) * output for prompt, output in lengths)
    context = weighted / sum(output for _, output in lengths)
    in_flight: deque[tuple[BatchShape, float]] = deque()
    steps: list[LoggedStep] = []
    prompts = _PromptStream(lengths)
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        for line in lines:
            row = json.loads(line)
            if row["tok"] and "done" in row:
                steps.append(LoggedStep(*in_flight.popleft(), float(row["done"])))
            elif row["tok"]:
                decodes = int(row["dec"])
                chunks = prompts.take(int(row["tok"]) - decodes)
                shape = BatchShape(chunks, decodes, decodes, round(context * decodes))
                in_flight.append((shape, float(row["t"])))
    return steps


class _PromptStream:
    def __init__(self, lengths: Lengths) -> None:
        self._lengths = lengths
        self._request = self._computed = 0

    def take(self, tokens: int) -> tuple[tuple[int, int], ...]:
        chunks = []
        while tokens > 0 and self._request < len(self._lengths):
            new = min(tokens, self._lengths[self._request][0] - self._computed)
            chunks.append((new, self._computed))
            self._computed += new
            tokens -= new
            if self._computed == self._lengths[self._request][0]:
                self._request, self._computed = self._request + 1, 0
        return tuple(chunks)


def alone(
    steps: Sequence[LoggedStep], first: StageTime, last: StageTime
) -> Iterator[tuple[int, float, float]]:
    """(tokens, profile seconds of both stages, excess) of prompt steps after two small ones.

    Of a two-stage pipeline. The first stage is taken to be free when the profile says so, and not
    later than the real time at which the last one can have got the step.
    """
    first_free_s = done_s = 0.0
    for index, step in enumerate(steps):
        first_s, last_s = first(step.shape), last(step.shape)
        first_free_s = max(step.schedule_s, first_free_s) + first_s
        expected_s = max(first_free_s, done_s) + last_s
        small = all(s.shape.num_tokens < SMALL_TOKENS for s in steps[max(index - 2, 0) : index])
        if index >= 2 and small and step.shape.prefills:
            yield step.shape.num_tokens, first_s + last_s, step.done_s - expected_s
        first_free_s = min(first_free_s, step.done_s - 0.95 * last_s)
        done_s = step.done_s


def back_to_back(
    steps: Sequence[LoggedStep], last: StageTime
) -> Iterator[tuple[int, float, float]]:
    """(tokens, profile seconds of the last stage, excess) of large steps after two alike.

    Where sizes are within 10 %, the last stage sets the time between two completions.
    """
    for index in range(2, len(steps)):
        tokens = [step.shape.num_tokens for step in steps[index - 2 : index + 1]]
        if min(tokens) > max(LARGE_TOKENS, 0.9 * max(tokens)) and steps[index].shape.prefills:
            last_s = last(steps[index].shape)
            yield tokens[-1], last_s, steps[index].done_s - steps[index - 1].done_s - last_s


def excess_table(rows: Sequence[tuple[int, float, float]]) -> list[Excess]:
    """Medians by tokens; classes with few steps are left out."""
    table = []
    for low, end in pairwise(CLASSES):
        chosen = [(own_s, more_s) for tokens, own_s, more_s in rows if low <= tokens < end]
        if len(chosen) >= MIN_STEPS:
            own, more = median(own for own, _ in chosen), median(more for _, more in chosen)
            table.append(Excess(low, end - 1, len(chosen), own, more))
    return table
