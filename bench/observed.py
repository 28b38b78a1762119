"""Schedulers that also write down each micro-batch, one JSON line a step, for stock and for ours.

Use `--scheduler-cls bench.observed.StockScheduler` or `bench.observed.ObservedScheduler`; the file
is named by BENCH_STEPS.
"""

import json
import os
import time
from collections.abc import Callable
from typing import Any


def _stock_class(config: Any) -> Any:
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler

    return AsyncScheduler if config.scheduler_config.async_scheduling else Scheduler


def _row(scheduler: Any, output: Any) -> dict[str, Any]:
    """What one micro-batch carries."""
    decodes = prefills = prefill_tokens = 0
    for request_id, tokens in output.num_scheduled_tokens.items():
        request = scheduler.requests[request_id]
        # schedule() has counted these tokens as computed already.
        if request.num_computed_tokens - tokens >= request.num_prompt_tokens:
            decodes += 1
        else:
            prefills += 1
            prefill_tokens += tokens
    return {
        "t": time.monotonic(),
        "tokens": output.total_num_scheduled_tokens,
        "decodes": decodes,
        "prefills": prefills,
        "prefill_tokens": prefill_tokens,
        "running": len(scheduler.running),
        "waiting": len(scheduler.waiting),
    }


def observe(scheduler: Any, extra: Callable[[], dict[str, Any]] = dict) -> Any:
    """Wraps `schedule()` of this one scheduler; what it returns passes through untouched.

    `extra` gives further fields for each row.
    """
    steps = open(os.environ["BENCH_STEPS"], "a", buffering=1)  # noqa: SIM115 - as long as the engine
    schedule = scheduler.schedule

    def observed(*args: Any, **kwargs: Any) -> Any:
        output = schedule(*args, **kwargs)
        if output.total_num_scheduled_tokens:
            steps.write(json.dumps(_row(scheduler, output) | extra()) + "\n")
        return output

    scheduler.schedule = observed
    return scheduler


class StockScheduler:
    """vLLM's own scheduler, observed."""

    def __new__(cls, vllm_config: Any, *args: Any, **kwargs: Any) -> Any:
        """Makes the class vLLM would have chosen for this configuration."""
        return observe(_stock_class(vllm_config)(vllm_config, *args, **kwargs))


class ObservedScheduler:
    """The plugin's scheduler, observed."""

    def __new__(cls, vllm_config: Any, *args: Any, **kwargs: Any) -> Any:
        """Makes `vllm_ppbalance.Scheduler` with the same arguments."""
        from vllm_ppbalance import Scheduler

        return observe(Scheduler(vllm_config, *args, **kwargs))
