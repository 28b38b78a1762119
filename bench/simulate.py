"""One run: a spec in, measures out; the same spec gives the same bytes."""

import gc
import json
import math
import resource
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import fmean
from time import perf_counter
from typing import Any, overload

import numpy as np

from bench.batch import BatchShape
from bench.bubbles import Busy, Load, StageUse, bubble_ratio, decode_spread, stage_use
from bench.clock import VirtualClock
from bench.engine import Engine, HostTime, RequestSpec, RunResult
from bench.measures import RequestRecord, Slo, measure, p90_rule
from bench.pipeline import LINKS, Activations, Pipeline
from bench.schedulers import make_scheduler
from bench.sim_spec import SimSpec, profile_of
from bench.versions import versions
from bench.vllm_harness import VllmAdapter
from bench.workloads import BenchRequest, build, prompt_token_ids, workload_hash

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
        return json.dumps(_finite(self.result), indent=1, sort_keys=True) + "\n"

    def write(self, path: Path) -> None:
        """Write the result, and the real costs beside it as `.real.json`."""
        path.parent.mkdir(parents=True, exist_ok=True)
        real = json.dumps(_finite(self.real), indent=1, sort_keys=True) + "\n"
        path.with_suffix(".real.json").write_text(real, encoding="utf-8")
        partial_path = path.with_suffix(".partial")
        partial_path.write_text(self.to_json(), encoding="utf-8")
        partial_path.replace(path)


class _Prompt(Sequence[int]):
    """Token ids of a prompt, made when they are read: a long trace would fill the memory."""

    def __init__(self, request: BenchRequest) -> None:
        self._request = request

    def __len__(self) -> int:
        return self._request.prompt_tokens

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> list[int]: ...
    def __getitem__(self, index: int | slice) -> int | list[int]:
        return prompt_token_ids(self._request)[index]

    def __iter__(self) -> Iterator[int]:
        return iter(prompt_token_ids(self._request))


def build_workload(spec: SimSpec, data: Path | None = None) -> list[BenchRequest]:
    """The requests; a relative path in the spec is looked up in `data`."""
    workload = spec.workload
    if workload.path is not None:
        path = Path(workload.path) if data is None else data / workload.path
        if not path.is_file():
            raise ValueError(f"{path}: no such trace file; --data or PPBALANCE_DATA says where")
        workload = replace(workload, path=path)
    requests = build(workload)
    if not requests:
        raise ValueError(f"workload {workload.name!r}: no requests in window {workload.window}")
    return requests


def make_pipeline(spec: SimSpec) -> Pipeline:
    """Stages of the spec's profile and layers, embedding on the first, LM head on the last."""
    profile = profile_of(spec.profile)
    seconds, layers = profile.compiled, spec.layers
    last, overhead = len(layers) - 1, spec.overhead

    def stage(index: int, num_layers: int) -> Callable[[BatchShape], float]:
        def alone(shape: BatchShape) -> float:
            return seconds(shape, num_layers, index == 0, index == last)

        return alone if overhead is None else overhead.wrap(alone, num_layers)

    return Pipeline(
        [stage(index, num_layers) for index, num_layers in enumerate(layers)],
        links=LINKS[spec.link],
        activations=Activations(profile.hidden_size),
        noise=spec.noise,
        seed=spec.seed,
    )


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
    longest = max(r.prompt_tokens + r.output_tokens for r in requests)
    scheduler = make_scheduler(spec, max(LONG, longest))
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
        run = engine.run(_sent(requests, spec.prefix_caching), until_s=spec.time_limit_s)
    if getattr(scheduler, "ppbalance_failed", False):
        raise PolicyFailedError(
            f"policy {spec.policy.name!r} failed and left stock scheduling: see the log"
        )
    stages = [[Busy(*interval) for interval in stage] for stage in pipeline.intervals]
    records = _records(requests, run)
    result = _result(spec, scheduler, requests, records, run, stages)
    return Outcome(spec, result, _real(scheduler, run, started), records, run, stages, rows)


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


def _sent(requests: Sequence[BenchRequest], token_ids: bool) -> Iterator[RequestSpec]:
    for r in requests:
        prompt = _Prompt(r) if token_ids else r.prompt_tokens
        yield RequestSpec(r.request_id, r.arrival_s, prompt, r.output_tokens, r.priority)


def _records(requests: Sequence[BenchRequest], run: RunResult) -> list[RequestRecord]:
    records = []
    for request in requests:
        served = run.requests.get(request.request_id)
        if served is None or not served.finished or served.first_token_s is None:
            continue
        records.append(
            RequestRecord(
                request.request_id,
                request.arrival_s,
                served.first_token_s,
                served.last_token_s or served.first_token_s,
                request.prompt_tokens,
                served.num_tokens,
                tuple(served.token_times_s),
            )
        )
    return records


def _result(
    spec: SimSpec,
    scheduler: Any,
    requests: Sequence[BenchRequest],
    records: list[RequestRecord],
    run: RunResult,
    stages: list[list[Busy]],
) -> dict[str, Any]:
    slo = Slo(spec.slo.ttft_s, spec.slo.tpot_s)
    own = getattr(scheduler, "ppbalance", None)
    return {
        "key": spec.key,
        "spec": spec.as_json(),
        "effective_settings": own.settings.model_dump(mode="json") if own else None,
        "versions": versions(),
        "workload": {
            "sha256": workload_hash(requests),
            "num_requests": len(requests),
            "span_s": max(r.arrival_s for r in requests),
            "prompt_tokens": sum(r.prompt_tokens for r in requests),
            "output_tokens": sum(r.output_tokens for r in requests),
        },
        "pipeline_overhead": spec.overhead.as_json() if spec.overhead else None,
        "num_gpu_blocks": spec.num_gpu_blocks,
        "measures": _measures(records, len(requests), slo),
        "pipeline": _pipeline(spec, requests, run, stages),
        "num_moves": own.num_moves if own else 0,
        "preemptions": sum(step.preemptions for step in run.steps),
    }


def _measures(records: list[RequestRecord], num_sent: int, slo: Slo) -> dict[str, Any]:
    if not records:
        return {"num_requests": 0, "num_unfinished": num_sent, "slo_attainment": 0.0}
    measures = asdict(measure(records, slo))
    measures["num_unfinished"] = num_sent - len(records)
    measures["slo_attainment"] *= len(records) / num_sent
    measures["meets_p90_rule"] = len(records) == num_sent and p90_rule(slo)(records)
    return measures


def _pipeline(
    spec: SimSpec, requests: Sequence[BenchRequest], run: RunResult, stages: list[list[Busy]]
) -> dict[str, Any]:
    loads = {step.step: Load(step.shape.prefill_tokens, step.shape.decodes) for step in run.steps}
    work = [
        (r.arrival_s, served.last_token_s if served.finished and served.last_token_s else run.end_s)
        for r in requests
        if (served := run.requests.get(r.request_id)) is not None
    ]
    uses: list[StageUse] = stage_use(stages, loads, work)
    bubbles = bubble_ratio(uses)
    spread = decode_spread([step.shape.decodes for step in run.steps], spec.pp_size)
    tokens = [step.shape.num_tokens for step in run.steps if step.shape.num_tokens]
    return {
        "busy_share": [use.busy_share for use in uses],
        "bubble_ratio": bubbles.total_s,
        "bubble_ratio_by_cause": {k.removesuffix("_s"): v for k, v in asdict(bubbles).items()},
        "decode_spread": asdict(spread),
        "steps": len(run.steps),
        "empty_steps": len(run.steps) - len(tokens),
        "tokens_per_step": fmean(tokens) if tokens else 0.0,
        "end_s": run.end_s,
    }


def _real(scheduler: Any, run: RunResult, started: float) -> dict[str, Any]:
    stock = scheduler.stock_time
    own = np.array(run.schedule_us) - np.array(stock.schedule_us)
    own_update = np.array(run.update_us) - np.array(stock.update_us)
    kibibytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    scale = 1 << 20 if sys.platform == "darwin" else 1 << 10
    return {
        "schedule_us": _summary(np.array(run.schedule_us)),
        "own_schedule_us": _summary(own),
        "own_update_us": _summary(own_update),
        "own_share_of_schedule": float(own.sum() / max(np.array(stock.schedule_us).sum(), 1e-9)),
        "wall_s": perf_counter() - started,
        "max_rss_mib": kibibytes / scale,
    }


def _summary(values: Any) -> dict[str, float]:
    if not len(values):
        return {}
    p50, p99 = np.percentile(values, (50, 99))
    return {"mean": float(values.mean()), "p50": float(p50), "p99": float(p99)}


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
