"""One run: a spec in, measures out; the same spec gives the same bytes."""

import gc
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

from bench.bubbles import Busy
from bench.clock import VirtualClock
from bench.engine import Engine
from bench.engine_types import HostTime, RunResult
from bench.measures import RequestRecord
from bench.run_record import finished, finite, real_costs, result_of
from bench.schedulers import make_scheduler
from bench.sim_spec import SimSpec
from bench.sim_world import build_workload, make_pipeline, sent
from bench.vllm_harness import VllmAdapter
from bench.warm_start import profile_folder
from bench.workloads import BenchRequest

__all__ = ["Outcome", "PolicyFailedError", "build_workload", "simulate"]

LONG = 8192  # smallest max_model_len
SAMPLED_TOKEN = 7  # lengths are given, so which token it is changes nothing


class PolicyFailedError(RuntimeError):
    """Our scheduler gave up: what stock then did must not be taken for its result."""


@dataclass(slots=True)
class Outcome:
    """A run's `result` (the same bytes each time), `real` costs (not), and what figures need.

    `rows` are the request ids of each step where they were asked for.
    """

    spec: SimSpec
    result: dict[str, Any]
    real: dict[str, Any]
    records: list[RequestRecord]
    run: RunResult
    stages: list[list[Busy]]
    rows: list[tuple[str, ...]] = field(default_factory=list)

    def to_json(self) -> str:
        """The result as it is written to a file; not-a-numbers become null."""
        return json.dumps(finite(self.result), indent=1, sort_keys=True) + "\n"

    def write(self, path: Path) -> None:
        """Write the result, and the real costs beside it as `.real.json`."""
        path.parent.mkdir(parents=True, exist_ok=True)
        real = json.dumps(finite(self.real), indent=1, sort_keys=True) + "\n"
        path.with_suffix(".real.json").write_text(real, encoding="utf-8")
        partial_path = path.with_suffix(".partial")
        partial_path.write_text(self.to_json(), encoding="utf-8")
        partial_path.replace(path)


def simulate(
    spec: SimSpec,
    data: Path | None = None,
    *,
    requests: Sequence[BenchRequest] | None = None,
    keep_rows: bool = False,
    progress: Callable[[float], None] | None = None,
) -> Outcome:
    """Serve the workload once. `requests` stand in for the spec's own workload.

    `progress` is called with the virtual time of each step. Raises ValueError for a bad spec.
    """
    started = perf_counter()
    requests = build_workload(spec, data) if requests is None else requests
    longest = max(LONG, *(r.prompt_tokens + r.output_tokens for r in requests))
    with profile_folder(spec, longest) as profiles:
        return _simulate(spec, requests, longest, profiles, keep_rows, progress, started)


def _simulate(
    spec: SimSpec,
    requests: Sequence[BenchRequest],
    max_model_len: int,
    profiles: Path | None,
    keep_rows: bool,
    progress: Callable[[float], None] | None,
    started: float,
) -> Outcome:
    scheduler = make_scheduler(spec, max_model_len, profiles)
    pipeline = make_pipeline(spec)
    clock = VirtualClock()
    rows: list[tuple[str, ...]] = []

    def watch(output: Any) -> None:
        if keep_rows:
            rows.append(tuple(output.num_scheduled_tokens))
        if progress is not None:
            progress(clock.monotonic())

    engine = Engine(
        scheduler,
        pipeline,
        VllmAdapter(sample=lambda _request_id, _position: SAMPLED_TOKEN),
        host=HostTime(**spec.host.model_dump()),
        clock=clock,
        on_schedule=watch if keep_rows or progress else None,
        keep_tokens=True,
    )
    with _rare_collection():
        run = engine.run(sent(requests, spec.prefix_caching), until_s=spec.time_limit_s)
        if getattr(scheduler, "ppbalance_failed", False):
            raise PolicyFailedError(
                f"policy {spec.policy.name!r} failed and left stock scheduling: see the log"
            )
        stages = [[Busy(*interval) for interval in stage] for stage in pipeline.intervals]
        records = finished(requests, run)
        own = getattr(scheduler, "ppbalance", None)
        if own is not None and own.saver is not None:
            own.saver.close()  # its thread must be done before its folder goes
        result = result_of(spec, scheduler, requests, records, run, stages)
    return Outcome(spec, result, real_costs(scheduler, run, started), records, run, stages, rows)


@contextmanager
def _rare_collection() -> Iterator[None]:
    """Collect garbage rarely: vLLM's many live objects make each collection long for nothing."""
    before = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(200_000, 20, 100)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()
