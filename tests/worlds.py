"""A small world for tests: vLLM's real scheduler, ours in front, over stages in virtual time."""

from dataclasses import dataclass, field
from typing import Any

from bench.clock import VirtualClock
from bench.engine import Engine
from bench.engine_types import RequestSpec, RunResult
from bench.pipeline import Pipeline
from bench.vllm_harness import VllmAdapter, build_scheduler
from vllm_ppbalance import Scheduler

SYNC = {"async_scheduling": False, "v2_model_runner": False}
SYNC_V2 = {"async_scheduling": False, "v2_model_runner": True}
ASYNC = {"async_scheduling": True, "v2_model_runner": True}
MODES = {"sync": SYNC, "sync-v2": SYNC_V2, "async-v2": ASYNC}


def stage_s(shape):
    """5 ms, 0.1 ms a decode, 10 us a prompt token."""
    return 5e-3 + 1e-4 * shape.decodes + 1e-5 * shape.prefill_tokens


@dataclass
class Ran:
    """What a run left: results, the scheduler itself, and each step's rows."""

    result: RunResult
    scheduler: Any
    rows: list[dict[str, int]] = field(default_factory=list)
    drafts: list[dict[str, list[int]]] = field(default_factory=list)
    budgets: list[int] = field(default_factory=list)
    held: list[frozenset[str]] = field(default_factory=list)
    intervals: list[list[Any]] = field(default_factory=list)  # of each stage

    @property
    def tokens(self):
        """Token ids of each request, in its own order."""
        return {name: record.token_ids for name, record in self.result.requests.items()}

    @property
    def decodes(self):
        """Decodes in each step, empty steps as 0."""
        return [step.shape.decodes for step in self.result.steps]

    @property
    def preemptions(self):
        """Preemptions over the run."""
        return sum(step.preemptions for step in self.result.steps)


def settings(chunk=None, rebalance=None, **chunk_knobs):
    """An `additional_config` for our scheduler."""
    own = {"chunk": {"strategy": chunk or "fixed", **chunk_knobs}}
    own["rebalance"] = {"strategy": rebalance or "off"}
    return {"ppbalance": own}


def serve(
    requests,
    *,
    stock=False,
    ours=Scheduler,
    additional_config=None,
    stage=stage_s,
    until_s=None,
    **options,
):
    """Serve `requests` to the end on `pp_size` equal stages (of one stage for stock PP=1)."""
    options.setdefault("num_gpu_blocks", 4096)  # making the blocks is most of a small test's time
    scheduler = build_scheduler(
        None if stock else ours,
        additional_config=additional_config or settings(),
        **options,
    )
    ran = Ran(RunResult({}, [], 0.0, [], []), scheduler)

    def watch(output):
        ran.rows.append(dict(output.num_scheduled_tokens))
        ran.drafts.append(dict(output.scheduled_spec_decode_tokens))
        own = getattr(scheduler, "ppbalance", None)
        parked = own.cohorts.parked.values() if own else ()
        ran.held.append(frozenset().union(*parked))

    engine = Engine(
        scheduler,
        Pipeline([stage] * options.get("pp_size", 1)),
        VllmAdapter(),
        clock=VirtualClock(),
        on_schedule=watch,
        keep_tokens=True,
    )
    ran.result = engine.run(requests, until_s=until_s)
    ran.intervals = engine.pipeline.intervals
    return ran


def batch_of(count, prompt=8, max_tokens=40, arrival_s=0.0, prefix="r", **fields):
    """`count` equal requests that arrive together."""
    return [
        RequestSpec(f"{prefix}{i}", arrival_s, prompt, max_tokens, **fields) for i in range(count)
    ]
