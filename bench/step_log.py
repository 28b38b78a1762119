"""Reads the step log that a server with PPBALANCE_TRACE wrote."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.batch import BatchShape
from bench.bubbles import Busy
from bench.timeline import Timeline
from vllm_ppbalance.bubble_estimate import BubbleEstimate
from vllm_ppbalance.trace import COLUMNS, VERSION

NEEDED = ("pp_size", "settings", "columns")


@dataclass(frozen=True, slots=True)
class LoggedMicroBatch:
    """One line; the fields are COLUMNS of `vllm_ppbalance.trace`, times in seconds."""

    step: int
    submitted_s: float
    start_s: float
    done_s: float
    stage_s: float
    clear: int
    predicted_s: float | None
    budget: int | None
    reason: str
    decodes: int
    decode_tokens: int
    decode_context: int
    prefills: tuple[tuple[int, int], ...]
    held: int
    waiting: int
    waiting_tokens: int
    kv_free: float
    ttft_s: float
    first_tokens: int
    gap_s: float
    gaps: int

    @property
    def shape(self) -> BatchShape:
        """What it asked of a stage."""
        return BatchShape(self.prefills, self.decodes, self.decode_tokens, self.decode_context)


@dataclass(frozen=True, slots=True)
class StepLog:
    """A whole file. `dropped` is the number of records the server had no room for."""

    header: Mapping[str, Any]
    batches: list[LoggedMicroBatch]
    dropped: int = 0

    @property
    def pp_size(self) -> int:
        """Stages of the pipeline."""
        return int(self.header["pp_size"])

    @property
    def settings(self) -> Mapping[str, Any]:
        """The plugin's settings as the server had them."""
        return dict(self.header["settings"])


def read_step_log(path: Path) -> StepLog:
    """The log in a file; a last line cut short is passed over. Raises ValueError and OSError."""
    with path.open(encoding="utf-8") as lines:
        header = _parse(path, 1, next(lines, ""))
        if not isinstance(header, dict) or header.get("ppbalance_trace") != VERSION:
            raise ValueError(f"{path}: not a step log of version {VERSION}")
        if missing := [name for name in NEEDED if name not in header]:
            raise ValueError(f"{path}: its first line lacks {', '.join(missing)}")
        if header["columns"] != list(COLUMNS):
            raise ValueError(f"{path}: other columns than {', '.join(COLUMNS)}")
        batches, dropped = [], 0
        for number, line in enumerate(lines, 2):
            if not line.endswith("\n"):
                break  # the server was killed while it wrote
            record = _parse(path, number, line)
            if isinstance(record, dict):
                dropped = int(record["dropped"])
            else:
                batches.append(_batch(path, number, record))
    if not batches:
        raise ValueError(f"{path}: holds no micro-batch")
    return StepLog(header, batches, dropped)


def _parse(path: Path, number: int, line: str) -> Any:
    try:
        return json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}, line {number}: {error}") from None


def _batch(path: Path, number: int, record: Any) -> LoggedMicroBatch:
    if not isinstance(record, list) or len(record) != len(COLUMNS):
        raise ValueError(f"{path}, line {number}: not {len(COLUMNS)} values")
    named = dict(zip(COLUMNS, record, strict=True))
    named["prefills"] = tuple((new, before) for new, before in named["prefills"])
    return LoggedMicroBatch(**named)


def replayed(log: StepLog) -> Iterator[tuple[LoggedMicroBatch, BubbleEstimate]]:
    """Each micro-batch with the account of the stages' idle time up to and with it."""
    estimate = BubbleEstimate(log.pp_size)
    for batch in log.batches:
        prefill = batch.shape.prefill_tokens > 0
        estimate.completed(batch.start_s, batch.stage_s, batch.done_s, prefill)
        yield batch, estimate


def timeline_of(log: StepLog, title: str) -> Timeline:
    """When each stage worked, for like stages; seconds since the first submission."""
    origin_s = log.batches[0].submitted_s
    stages: list[list[Busy]] = [[] for _ in range(log.pp_size)]
    idle_s = work_s = 0.0
    for batch, estimate in replayed(log):
        took_s = max(batch.stage_s, 0.0)
        for rows, left_s in zip(stages, estimate.left_s, strict=True):
            rows.append(Busy(batch.step, left_s - took_s - origin_s, left_s - origin_s))
        idle_s, work_s = sum(estimate.idle_s), estimate.work_s
    shapes = {b.step: b.shape for b in log.batches}
    counters = [
        (b.submitted_s - origin_s, {"waiting": b.waiting, "held": b.held, "budget": b.budget or 0})
        for b in log.batches
    ]
    middle_s = (log.batches[-1].done_s - origin_s) / 2.0
    return Timeline(title, stages, shapes, idle_s / work_s if work_s else 0.0, middle_s, counters)
