"""The mixin over vLLM's schedulers: read state, decide, apply, super().schedule(), observe.

With `reader.py` and `apply.py` the only place that knows the fields of vLLM's scheduler and
requests.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import cache
from time import perf_counter
from typing import TYPE_CHECKING, Any

from vllm_ppbalance.adapters import keep_within
from vllm_ppbalance.admission import NO_CHANGE, OnTimeFirst
from vllm_ppbalance.apply import hold, release_if_empty, reorder
from vllm_ppbalance.controller import Controller
from vllm_ppbalance.measuring import MeasuringMixin
from vllm_ppbalance.reader import (
    cadence,
    can_reorder,
    new_tokens,
    read_state,
    smallest_budget,
)
from vllm_ppbalance.rows import NOBODY, read_rows
from vllm_ppbalance.state import Decision, MicroBatch
from vllm_ppbalance.step_timer import Step
from vllm_ppbalance.telemetry import Telemetry, start_telemetry

if TYPE_CHECKING:
    from vllm_ppbalance.config import Settings

# Under "vllm." so that vLLM's own handler and format apply.
logger = logging.getLogger("vllm.ppbalance")

# A request can leave `running` on ways we are not told of (streaming sessions, cache resets). A
# prime, so that every cohort gets its turn.
RESYNC_STEPS = 61


class PPBalanceMixin(MeasuringMixin):
    """Chooses the token budget and holds decodes back, then lets vLLM schedule.

    Stands in front of vLLM's Scheduler or AsyncScheduler in the method resolution order. What goes
    wrong in here is logged once and leaves stock scheduling; what goes wrong in vLLM is vLLM's.
    """

    settings: Settings  # set on the class by `balanced_class`
    telemetry: Telemetry | None

    # vLLM's own, from the class behind us.
    vllm_config: Any
    current_step: int
    max_num_scheduled_tokens: int
    num_spec_tokens: int
    lora_config: Any
    requests: dict[str, Any]
    running: list[Any]
    waiting: Any
    finished_req_ids: set[str]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.ppbalance_failed = False
        self._stock_budget: int = self.max_num_scheduled_tokens
        try:
            self._set_up(kwargs)
        except Exception:
            self.ppbalance_failed, self.telemetry, self._profile_run = True, None, None
            logger.exception("ppbalance failed to start; this engine has stock scheduling.")

    def _set_up(self, kwargs: Mapping[str, Any]) -> None:
        pp_size = self.vllm_config.parallel_config.pipeline_parallel_size
        self.ppbalance = Controller(self.settings, pp_size, cadence(self.vllm_config))
        self.ppbalance.budget_floor = smallest_budget(self)
        if self.settings.admission.strategy == "on_time" and can_reorder(self):
            self.ppbalance.admission = OnTimeFirst(self.settings)
        self._decision: Decision | None = None  # for the micro-batch being formed
        self._profile_run = None
        self.telemetry = start_telemetry(self.ppbalance, self.vllm_config)
        if self.settings.needs_cost_model:
            hash_block = kwargs.get("hash_block_size") or kwargs.get("block_size", 16)
            self._guard(self._begin_profile, hash_block)

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """vLLM's schedule(), within the budget and without the held decodes."""
        self._guard(self._before)
        try:
            output = super().schedule(*args, **kwargs)  # type: ignore[misc]
        finally:
            self.max_num_scheduled_tokens = self._stock_budget
        self._guard(self._after, output)
        return output

    def update_from_output(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        """vLLM's update_from_output(); the latencies of the finished step are noted."""
        result = super().update_from_output(scheduler_output, *args, **kwargs)  # type: ignore[misc]
        self._guard(self._observe, scheduler_output, result)
        self._measure(result)
        if self.telemetry is not None:
            self.telemetry.attach(result, failed=self.ppbalance_failed, idle=not self.running)
        return result

    def add_request(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        """vLLM's add_request(); the prompt is counted."""
        new = request.request_id not in self.requests
        self._make_way(request)
        result = super().add_request(request, *args, **kwargs)  # type: ignore[misc]
        if new:
            self._guard(self._arrived, request)
        return result

    def _preempt_request(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        self._guard(self._forget_preempted, request)
        return super()._preempt_request(request, *args, **kwargs)  # type: ignore[misc]

    def shutdown(self, *args: Any, **kwargs: Any) -> Any:
        """vLLM's shutdown(); what was learnt is kept."""
        self._guard(self._keep_what_was_learnt)
        if self.telemetry is not None:
            self.telemetry.close()
        return super().shutdown(*args, **kwargs)  # type: ignore[misc]

    def _guard(self, hook: Callable[..., None], *args: Any) -> None:
        """Run our own code: the first failure ends it for good, never a request."""
        if self.ppbalance_failed:
            return
        started = perf_counter()
        try:
            hook(*args)
        except Exception:
            self.ppbalance_failed = True
            self.max_num_scheduled_tokens = self._stock_budget
            logger.exception("ppbalance failed; this engine goes on with stock scheduling.")
            self._abort_profile()
        finally:
            if self.telemetry is not None:
                self.telemetry.own_s += perf_counter() - started

    def _arrived(self, request: Any) -> None:
        self.ppbalance.arrived(request.request_id, request.num_tokens, request.arrival_time)

    def _keep_what_was_learnt(self) -> None:
        if self.ppbalance.saver is not None:
            self.ppbalance.saver.close()

    def _before(self) -> None:
        own, step = self.ppbalance, self.current_step + 1
        if self.finished_req_ids:
            own.finished(self.finished_req_ids)
        own.cohorts.begin_step(step, self.finished_req_ids)
        if own.may_be_empty:
            release_if_empty(self.requests, own.cohorts, step)
        if not step % RESYNC_STEPS:
            own.cohorts.ready.intersection_update(r.request_id for r in self.running)
        if not own.adapters_fit:
            own.adapters_fit = keep_within(self.lora_config.max_loras, self.running, step)
        self._decision = None
        if own.steady(step):
            return
        self._decision = decision = own.decide(read_state(self, own, step, self._stock_budget))
        if decision.hold:
            hold(self.requests, decision.hold, step)
        if decision.order is not NO_CHANGE:
            reorder(self.waiting, decision.order, self.requests)
        run = self._profile_run
        self.max_num_scheduled_tokens = run.profile.budget if run else decision.budget

    def _after(self, output: Any) -> None:
        own, step = self.ppbalance, self.current_step
        if not output.num_scheduled_tokens:
            own.timer.scheduled(Step(output, step, NOBODY, NOBODY, None, 0.0))
            return
        rows = read_rows(self, own, output)
        if rows.admitted and self.lora_config is not None:
            own.adapters_fit = False  # not known: looked at before the next step
        now_s, measuring = own.clock.monotonic(), self._profile_run is not None
        own.timer.scheduled(
            Step(
                output,
                step,
                rows.decodes,
                rows.firsts,
                rows.batch,
                now_s,
                self._decision,
                measuring,
            )
        )
        own.cohorts.scheduled(rows.batch, rows.ran, rows.prompts, rows.ended)

    def _observe(self, output: Any, result: Mapping[int, Any]) -> None:
        own = self.ppbalance
        step = own.timer.returned(output)
        if step is None:
            return
        now_s, wall_s = own.clock.monotonic(), own.clock.time()
        seconds = own.timer.stage_s(step, now_s)
        if step.batch is None:
            return
        if self.telemetry is not None and not step.measuring:
            self.telemetry.completed(step, seconds, now_s)  # predicts before this is learnt
        if seconds is not None:
            self._learn(step.batch, seconds, now_s)
        if step.measuring:
            own.cohorts.completed(step.step)
            return
        produced = new_tokens(result, step.decodes) if self.num_spec_tokens else None
        own.timer.decode_tokens(step.decodes, now_s, produced)
        if step.firsts:
            # A KV connector that reads its blocks keeps an aborted request, long forgotten here.
            just_ended, requests = self.finished_req_ids, map(self.requests.get, step.firsts)
            ttfts = {
                r.request_id: wall_s - r.arrival_time
                for r in requests
                if r is not None and (not r.is_finished() or r.request_id in just_ended)
            }
            own.timer.first_tokens(ttfts, now_s)
        own.cohorts.completed(step.step)

    def _learn(self, batch: MicroBatch, seconds: float, now_s: float) -> None:
        if self._profile_run is not None:
            self._profile_run.profile.measured(batch, seconds)
        else:
            self.ppbalance.learn(batch, seconds, now_s)

    def _forget_preempted(self, request: Any) -> None:
        if self.ppbalance.preempted(request.request_id, request.num_tokens, self.current_step):
            # The RUNNING loop would hold its next prompt chunks back as well.
            request.next_decode_eligible_step = self.current_step


@cache
def balanced_class(stock: type, settings: Settings) -> type:
    """The class that schedules with `settings` on top of the stock scheduler `stock`."""
    name = f"PPBalance{stock.__name__}"
    return type(name, (PPBalanceMixin, stock), {"settings": settings, "__module__": __name__})
