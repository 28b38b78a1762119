"""The mixin over vLLM's schedulers: read state, decide, apply, super().schedule(), observe.

The only file that knows the fields of vLLM's scheduler and requests.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Set
from functools import cache
from typing import TYPE_CHECKING, Any

from vllm.v1.request import RequestStatus

from vllm_ppbalance.cohorts import Flight
from vllm_ppbalance.controller import Controller
from vllm_ppbalance.state import Decode, Lazy, MicroBatch, PipelineState, Waiting
from vllm_ppbalance.step_timer import Step

if TYPE_CHECKING:
    from vllm_ppbalance.config import Settings

# Under "vllm." so that vLLM's own handler and format apply.
logger = logging.getLogger("vllm.ppbalance")

# A request can leave `running` on ways we are not told of (streaming sessions, cache resets).
RESYNC_STEPS = 64
NOBODY: Set[str] = frozenset()


class PPBalanceMixin:
    """Chooses the token budget and holds decodes back, then lets vLLM schedule.

    Stands in front of vLLM's Scheduler or AsyncScheduler in the method resolution order. What goes
    wrong in here is logged once and leaves stock scheduling; what goes wrong in vLLM is vLLM's.
    """

    settings: Settings  # set on the class by `balanced_class`
    ppbalance: Controller
    ppbalance_failed: bool

    # vLLM's own, from the class behind us.
    vllm_config: Any
    kv_cache_manager: Any
    current_step: int
    max_num_scheduled_tokens: int
    num_spec_tokens: int
    requests: dict[str, Any]
    running: list[Any]
    finished_req_ids: set[str]
    get_request_counts: Callable[[], tuple[int, int]]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        pp_size = self.vllm_config.parallel_config.pipeline_parallel_size
        self.ppbalance = Controller(self.settings, pp_size, cadence(self.vllm_config))
        self.ppbalance_failed = False
        self._stock_budget: int = self.max_num_scheduled_tokens
        self._budget_floor = smallest_budget(self)
        self._prefilling: set[str] = set()

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
        return result

    def _preempt_request(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        self._guard(self._forget_preempted, request)
        return super()._preempt_request(request, *args, **kwargs)  # type: ignore[misc]

    def _guard(self, hook: Callable[..., None], *args: Any) -> None:
        """Run our own code: the first failure ends it for good, never a request."""
        if self.ppbalance_failed:
            return
        try:
            hook(*args)
        except Exception:
            self.ppbalance_failed = True
            self.max_num_scheduled_tokens = self._stock_budget
            logger.exception("ppbalance failed; this engine goes on with stock scheduling.")

    def _before(self) -> None:
        own = self.ppbalance
        step = self.current_step + 1
        if self.finished_req_ids:
            self._prefilling -= self.finished_req_ids
            own.timer.forget(self.finished_req_ids)
        own.cohorts.begin_step(step, self.finished_req_ids)
        if not step % RESYNC_STEPS:
            own.cohorts.ready.intersection_update(r.request_id for r in self.running)
        decision = own.decide(self._state(step))
        for request_id, steps in decision.hold.items():
            request = self.requests[request_id]
            request.next_decode_eligible_step = max(request.next_decode_eligible_step, step + steps)
        self.max_num_scheduled_tokens = decision.budget

    def _state(self, step: int) -> PipelineState:
        cohorts = self.ppbalance.cohorts
        num_ready = len(cohorts.ready)
        decode_budget = num_ready * (1 + self.num_spec_tokens)
        now_s = self.ppbalance.clock.monotonic()
        num_waiting = self.get_request_counts()[1]
        return PipelineState(
            step=step,
            now_s=now_s,
            pp_size=cohorts.pp_size,
            max_budget=self._stock_budget,
            min_budget=min(decode_budget + self._budget_floor, self._stock_budget),
            decode_budget=decode_budget,
            num_ready=num_ready,
            ready=Lazy(self._ready, step),
            in_flight=cohorts.in_flight(),
            recent=cohorts.recent,
            parked=cohorts.parked_counts(),
            num_waiting=num_waiting,
            num_prefilling=len(self._prefilling),
            waiting=Lazy(self._waiting),
            kv_free=1.0 - self.kv_cache_manager.usage,
            totals=self.ppbalance.timer.totals,
        )

    def _ready(self, step: int) -> list[Decode]:
        cohorts, last = self.ppbalance.cohorts, self.ppbalance.timer.last_token_s
        return [
            Decode(
                request.request_id,
                request.num_computed_tokens,
                request.num_output_tokens,
                cohorts.holds_in_a_row.get(request.request_id, 0),
                last.get(request.request_id, 0.0),
            )
            for request in self.running
            if request.request_id in cohorts.ready and can_decode(request, step)
        ]

    def _waiting(self) -> list[Waiting]:
        now_s = self.ppbalance.clock.time()
        chunked = [r for r in self.running if r.request_id in self._prefilling]
        return [
            Waiting(
                request.request_id,
                request.num_tokens - request.num_computed_tokens,
                request.num_computed_tokens,
                max(now_s - request.arrival_time, 0.0),
                request.status == RequestStatus.RUNNING,
            )
            for request in [*chunked, *waiting_requests(self)]
        ]

    def _after(self, output: Any) -> None:
        own, step = self.ppbalance, self.current_step
        tokens: Mapping[str, int] = output.num_scheduled_tokens
        if not tokens:
            own.timer.scheduled(Step(output, step, NOBODY, NOBODY))
            return
        ran = tokens.keys()
        prompts = self._prompts(output, ran)
        cached = output.scheduled_cached_reqs
        context = sum(cached.num_computed_tokens)
        decode_tokens = output.total_num_scheduled_tokens
        decodes: Set[str] = ran
        next_decodes, firsts = set(ran), NOBODY
        prefills: tuple[tuple[int, int], ...] = ()
        if prompts:
            unfinished = {r for r in prompts if self.requests[r].is_prefill_chunk}
            self._prefilling = (self._prefilling - prompts) | unfinished
            done = prompts - unfinished
            firsts = {r for r in done if not self.requests[r].num_output_tokens}
            decodes = ran - prompts
            next_decodes -= unfinished
            before = {r: self.requests[r].num_computed_tokens - tokens[r] for r in prompts}
            prefills = tuple((tokens[r], prefix) for r, prefix in before.items())
            decode_tokens -= sum(new for new, _ in prefills)
            new_ids = {new.req_id for new in output.scheduled_new_reqs}
            context -= sum(prefix for r, prefix in before.items() if r not in new_ids)
        own.timer.scheduled(Step(output, step, decodes, firsts))
        batch = MicroBatch(
            step, len(ran), len(decodes), decode_tokens, context, prefills, len(next_decodes)
        )
        own.cohorts.scheduled(Flight(batch, next_decodes), ran)

    def _prompts(self, output: Any, ran: Set[str]) -> Set[str]:
        """Rows that were still computing their prompt: new, resumed, or chunked before."""
        resumed: Set[str] = output.scheduled_cached_reqs.resumed_req_ids
        if not (output.scheduled_new_reqs or resumed or self._prefilling):
            return NOBODY
        prompts = self._prefilling & ran
        prompts.update(new.req_id for new in output.scheduled_new_reqs)
        return prompts | resumed

    def _observe(self, output: Any, result: Mapping[int, Any]) -> None:
        own = self.ppbalance
        step = own.timer.returned(output)
        if step is None or not output.num_scheduled_tokens:
            return
        now_s, wall_s = own.clock.monotonic(), own.clock.time()
        produced = None
        if self.num_spec_tokens:
            produced = sum(
                len(row.new_token_ids)
                for client in result.values()
                for row in client.outputs
                if row.request_id in step.decodes
            )
        own.timer.decode_tokens(step.decodes, now_s, produced)
        if step.firsts:
            requests = (self.requests.get(request_id) for request_id in step.firsts)
            ttfts = {r.request_id: wall_s - r.arrival_time for r in requests if r is not None}
            own.timer.first_tokens(ttfts, now_s)
        own.cohorts.completed(step.step)

    def _forget_preempted(self, request: Any) -> None:
        self._prefilling.discard(request.request_id)
        if self.ppbalance.preempted(request.request_id, self.current_step):
            # The RUNNING loop would hold its next prompt chunks back as well.
            request.next_decode_eligible_step = self.current_step


def cadence(vllm_config: Any) -> str:
    """How vLLM spaces a request's decodes under this configuration; see `Controller`."""
    if not vllm_config.scheduler_config.async_scheduling:
        return "completion"
    return "step" if vllm_config.use_v2_model_runner else "none"


def smallest_budget(scheduler: Any) -> int:
    """Tokens a micro-batch needs beyond its decodes so that a prompt always makes progress.

    The stock budget where vLLM may need all of it at once: prompts that cannot be chunked, or
    multi-modal items that must not be split.
    """
    config = scheduler.vllm_config.scheduler_config
    whole_items = scheduler.max_num_encoder_input_tokens and (
        scheduler.is_encoder_decoder or config.disable_chunked_mm_input
    )
    if not config.enable_chunked_prefill or whole_items:
        return int(scheduler.max_num_scheduled_tokens)
    floor = max(1, config.long_prefill_token_threshold)
    if scheduler.need_mamba_block_aligned_split:
        floor = max(floor, scheduler.cache_config.block_size)
    return int(floor + getattr(scheduler, "num_prefill_lookahead", 0))


def can_decode(request: Any, step: int) -> bool:
    """Whether vLLM would schedule this request as a decode in `step`."""
    in_flight = request.num_output_placeholders
    if in_flight and request.num_output_tokens + in_flight >= request.max_tokens:
        return False
    return bool(
        request.status == RequestStatus.RUNNING
        and not request.is_prefill_chunk
        and request.next_decode_eligible_step <= step
        and request.num_tokens_with_spec + in_flight > request.num_computed_tokens
    )


def waiting_requests(scheduler: Any) -> list[Any]:
    """Everything not yet admitted, in vLLM's order; 0.32 renamed the second queue."""
    second = getattr(scheduler, "kv_holding_waiting", None)
    if second is None:
        second = scheduler.skipped_waiting
    return [*second, *scheduler.waiting]


@cache
def balanced_class(stock: type, settings: Settings) -> type:
    """The class that schedules with `settings` on top of the stock scheduler `stock`."""
    name = f"PPBalance{stock.__name__}"
    return type(name, (PPBalanceMixin, stock), {"settings": settings, "__module__": __name__})
