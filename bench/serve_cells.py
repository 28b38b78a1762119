"""The runs of `bench serve`: workloads x rates x seeds, each a list of requests to send."""

import hashlib
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench.openai_server import ServedModel
from bench.sim_spec import parse_workload
from bench.sim_world import build_requests
from bench.sweep import at_rate
from bench.workloads import WORKLOADS, BenchRequest, WorkloadSpec, workload_hash

MAX_RATES = 1000


@dataclass(frozen=True, slots=True)
class Cell:
    """One run: a workload and its requests in order of arrival, times in seconds."""

    workload: WorkloadSpec
    requests: tuple[BenchRequest, ...]

    @property
    def name(self) -> str:
        """As it is shown while it runs."""
        rate = "" if self.workload.rate is None else f", {self.workload.rate:g} req/s"
        return f"{self.workload.name}{rate}, seed {self.workload.seed}"

    @property
    def span_s(self) -> float:
        """When the last request is sent."""
        return self.requests[-1].arrival_s

    @property
    def sha256(self) -> str:
        """Over all fields of all requests."""
        return workload_hash(self.requests)

    def salt(self, purpose: str = "") -> int:
        """What sets the prompts' tokens apart from those of other cells and purposes: 64 bits."""
        text = f"{self.sha256} {self.workload.seed} {purpose}"
        return int(hashlib.sha256(text.encode()).hexdigest()[:16], 16)


def key_of(cell: Cell, label: str, server: ServedModel, tokenizer: str | None) -> str:
    """A name for the run: 16 hex digits over all that determines it.

    `label` stands for the server's settings, which it does not tell.
    """
    parts = {
        "label": label,
        "server": server.as_json(),
        "tokenizer": tokenizer,
        "workload": cell.workload.name,
        "seed": cell.workload.seed,
        "sha256": cell.sha256,
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def parse_rates(text: str) -> list[float]:
    """Requests a second from START,STOP,STEP, STOP itself left out. Raises ValueError."""
    words = text.split(",")
    try:
        start, stop, step = (float(word) for word in words)
    except ValueError:
        raise ValueError(f"--request-rate-range {text}: must be START,STOP,STEP") from None
    if not (0.0 < start < stop < math.inf and 0.0 < step < math.inf):
        raise ValueError(f"--request-rate-range {text}: need 0 < START < STOP and STEP above 0")
    count = math.ceil((stop - start) / step - 1e-9)
    if count > MAX_RATES:
        raise ValueError(f"--request-rate-range {text}: {count} rates; at most {MAX_RATES}")
    return [round(start + index * step, 9) for index in range(count)]


def parse_workload_word(word: str) -> dict[str, str]:
    """NAME or NAME=TRACE_FILE. Raises ValueError."""
    name, equals, path = word.partition("=")
    if name not in WORKLOADS:
        raise ValueError(
            f"--workload {word}: {name!r} is unknown; there are: {', '.join(WORKLOADS)}"
        )
    if equals and not path:
        raise ValueError(f"--workload {word}: names no file after the =")
    return {"name": name, "path": path} if path else {"name": name}


def make_cells(
    words: Sequence[str],
    fields: dict[str, Any],
    rates: Sequence[float],
    seeds: Sequence[int],
    duration_s: float,
    data: Path | None,
) -> list[Cell]:
    """The runs in order; `fields` are those of a workload. Raises ValueError.

    Arrivals that are drawn go on for `duration_s` unless a window or a number of prompts is given.
    """
    cells = []
    for workload in _workloads(words, fields, rates, seeds):
        drawn = _is_drawn(workload)
        if drawn and workload.window is None and workload.num_prompts is None:
            workload = replace(workload, window=(0.0, duration_s))
        cells.append(Cell(workload, tuple(build_requests(workload, data))))
    return cells


def _workloads(
    words: Sequence[str], fields: dict[str, Any], rates: Sequence[float], seeds: Sequence[int]
) -> Iterator[WorkloadSpec]:
    for word in words:
        for seed in seeds:
            plain = {**fields, **parse_workload_word(word), "seed": seed}
            if not rates:
                yield parse_workload(plain)
            for rate in rates:
                yield parse_workload(at_rate(plain, rate))


def _is_drawn(workload: WorkloadSpec) -> bool:
    if workload.arrival is not None:
        return workload.arrival != "trace"
    return workload.path is None or not WORKLOADS[workload.name].has_times


def fitting(cell: Cell, server: ServedModel, skip_long: bool) -> Cell:
    """The cell without what the server cannot hold; that is an error unless `skip_long`."""
    longest = server.max_model_len
    if longest is None:
        return cell
    kept = tuple(r for r in cell.requests if r.prompt_tokens + r.output_tokens <= longest)
    if len(kept) == len(cell.requests):
        return cell
    left_out = len(cell.requests) - len(kept)
    if not skip_long or not kept:
        raise ValueError(
            f"{cell.name}: {left_out} of {len(cell.requests)} requests are longer than the "
            f"server's max_model_len = {longest}; --skip-long leaves such requests out"
        )
    return replace(cell, requests=kept)
