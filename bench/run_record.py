"""The record of a run: measures, the pipeline's bubbles, and what it cost in real time."""

import math
import resource
import sys
from collections.abc import Sequence
from dataclasses import asdict
from statistics import fmean
from time import perf_counter
from typing import Any

import numpy as np

from bench.bubbles import Busy, Load, StageUse, bubble_ratio, decode_spread, stage_use
from bench.engine_types import RunResult
from bench.measures import RequestRecord, Slo, measure, p90_rule
from bench.sim_spec import SimSpec
from bench.versions import versions
from bench.workloads import BenchRequest, workload_hash


def finished(requests: Sequence[BenchRequest], run: RunResult) -> list[RequestRecord]:
    """What `bench.measures` needs of each request that was served to its end."""
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


def result_of(
    spec: SimSpec,
    scheduler: Any,
    requests: Sequence[BenchRequest],
    records: list[RequestRecord],
    run: RunResult,
    stages: list[list[Busy]],
) -> dict[str, Any]:
    """All that is the same in every run of `spec`, as plain values."""
    slo = Slo(spec.slo.ttft_s, spec.slo.tpot_s)
    own = getattr(scheduler, "ppbalance", None)
    return {
        "key": spec.key,
        "spec": spec.as_json(),
        "effective_settings": _settings(own) if own else None,
        "versions": versions(),
        "workload": workload_facts(requests),
        "pipeline_overhead": spec.overhead.as_json() if spec.overhead else None,
        "num_gpu_blocks": spec.num_gpu_blocks,
        "measures": measures_of(records, len(requests), slo),
        "pipeline": _pipeline(spec, requests, run, stages),
        "num_moves": own.num_moves if own else 0,
        "preemptions": sum(step.preemptions for step in run.steps),
    }


def _settings(controller: Any) -> dict[str, Any]:
    """Without the folder of the profiles, which is another one in each run."""
    settings: dict[str, Any] = controller.settings.model_dump(mode="json")
    settings["profiling"].pop("directory")
    return settings


def workload_facts(requests: Sequence[BenchRequest]) -> dict[str, Any]:
    """What was sent: a hash of all of it, and sums."""
    return {
        "sha256": workload_hash(requests),
        "num_requests": len(requests),
        "span_s": max(r.arrival_s for r in requests),
        "prompt_tokens": sum(r.prompt_tokens for r in requests),
        "output_tokens": sum(r.output_tokens for r in requests),
    }


def measures_of(records: Sequence[RequestRecord], num_sent: int, slo: Slo) -> dict[str, Any]:
    """Measures as plain values; a request that was not served to its end counts as a missed SLO."""
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


def real_costs(scheduler: Any, run: RunResult, started: float) -> dict[str, Any]:
    """Real microseconds and memory since `started` (of `perf_counter`): never the same twice."""
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


def finite(value: Any) -> Any:
    """Plain values with null for what is not a number."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
