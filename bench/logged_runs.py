"""The engine's step logs (`h200x2_pp2`) as micro-batches with measured stage times.

A log holds token and decode counts only. Prompts are served first come, first served, and a decode
comes back every pp_size steps, so the workload's lengths give each chunk's prefix and each decode's
context.
"""

import csv
import gzip
import json
from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_ppbalance.profile_fit import Measured
from vllm_ppbalance.stage_times import StageTimes

PP_SIZE = 2
MAX_OUTPUT = 2000  # tokens; the cap of these runs

Prefills = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class LoggedStep:
    """A completed, non-empty step.

    `by_gap` as in `StageTimes`; `full` says that pp_size other batches were in flight when it was
    done, so that every stage had work before and after.
    """

    measured: Measured
    by_gap: bool
    full: bool


@dataclass(slots=True)
class _Decode:
    context: int
    left: int  # tokens still to come
    last_step: int


class Replay:
    """Finds the prompt chunks and the decode context of each step of one run.

    With `even_share` the log does not say which decodes were held back: those that ran last wait.
    """

    def __init__(self, lengths: list[tuple[int, int]], even_share: bool) -> None:
        self._prompts = deque((prompt, 0, output) for prompt, output in lengths)
        self._due: dict[int, list[_Decode]] = defaultdict(list)
        self._even_share = even_share
        self.mismatches = 0  # steps with another number of decodes than the replay gives

    def step(self, number: int, tokens: int, decodes: int) -> tuple[Prefills, int]:
        """(new tokens, prefix) of each chunk, and the tokens all decodes read."""
        running = self._due.pop(number, [])
        if self._even_share:
            running.sort(key=lambda decode: decode.last_step)
            self._due[number + 1] = running[decodes:] + self._due[number + 1]
            running = running[:decodes]
        self.mismatches += len(running) != decodes
        context = sum(decode.context for decode in running)
        for decode in running:
            self._comes_back(decode.context + 1, decode.left - 1, number)
        return tuple(self._prefill(number, tokens - decodes)), context

    def _comes_back(self, context: int, left: int, number: int) -> None:
        if left > 0:
            self._due[number + PP_SIZE].append(_Decode(context, left, number))

    def _prefill(self, number: int, tokens: int) -> Iterator[tuple[int, int]]:
        while tokens > 0:
            prompt, computed, output = self._prompts.popleft()
            new = min(tokens, prompt - computed)
            yield new, computed
            tokens, computed = tokens - new, computed + new
            if computed < prompt:
                self._prompts.appendleft((prompt, computed, output))
            else:
                self._comes_back(prompt + 1, output - 1, number)


def load_runs(folder: Path) -> list[dict[str, Any]]:
    """The runs of `runs.json` whose log is there."""
    runs = json.loads((folder / "runs.json").read_text(encoding="utf-8"))
    return [run for run in runs if _log(folder, run).is_file()]


def load_lengths(path: Path) -> list[tuple[int, int]]:
    """(prompt, output) tokens of every row of the trace."""
    with path.open(encoding="utf-8", newline="") as file:
        return [(int(r["ContextTokens"]), int(r["GeneratedTokens"])) for r in csv.DictReader(file)]


def run_lengths(run: dict[str, Any], lengths: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """(prompt, output) tokens of the run's requests."""
    swapped = str(run["lengths"]).endswith("swapped")
    pairs = [(out, prompt) if swapped else (prompt, out) for prompt, out in lengths]
    return [(prompt, min(out, MAX_OUTPUT)) for prompt, out in pairs[: int(run["num_prompts"])]]


def logged_steps(
    folder: Path, run: dict[str, Any], lengths: list[tuple[int, int]]
) -> tuple[list[LoggedStep], int]:
    """The run's steps in the order they were done, and the replay's mismatches."""
    replay = Replay(run_lengths(run, lengths), bool(run["decode_even_share"]))
    stages, steps = StageTimes(PP_SIZE), []
    in_flight: deque[tuple[float, int, int, Prefills, int]] = deque()
    with gzip.open(_log(folder, run), "rt", encoding="utf-8") as lines:
        for row in map(json.loads, lines):
            tokens = int(row["tok"])
            if "step" in row:
                decodes = int(row["dec"])
                prefills, context = replay.step(int(row["step"]), tokens, decodes)
                if tokens:
                    in_flight.append((float(row["t"]), tokens, decodes, prefills, context))
            elif tokens:
                submitted_s, tokens, decodes, prefills, context = in_flight.popleft()
                seconds, by_gap = stages.completed(submitted_s, float(row["done"]))
                measured = Measured(tokens, prefills, decodes, context, seconds)
                steps.append(LoggedStep(measured, by_gap, len(in_flight) >= PP_SIZE))
    return steps, replay.mismatches


def _log(folder: Path, run: dict[str, Any]) -> Path:
    return folder / f"steps_{run['name']}.jsonl.gz"
