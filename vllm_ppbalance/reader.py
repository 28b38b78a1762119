"""Reads vLLM's scheduler and requests into the values that policies see.

With `scheduler.py` the only place that knows their fields.
"""

from collections import deque
from collections.abc import Iterator, Mapping, Set
from itertools import chain
from typing import Any

from vllm_ppbalance.controller import Controller
from vllm_ppbalance.lazy import Lazy
from vllm_ppbalance.state import Decode, PipelineState, Waiting


def read_state(scheduler: Any, own: Controller, step: int, stock_budget: int) -> PipelineState:
    """The pipeline just before micro-batch `step`; `stock_budget` is vLLM's, in tokens."""
    cohorts, requests, chunked = own.cohorts, scheduler.requests, own.prefilling
    num_ready = len(cohorts.ready)
    decode_budget = num_ready * (1 + scheduler.num_spec_tokens)
    floor, limited = own.budget_floor, scheduler.scheduler_config.long_prefill_token_threshold
    if getattr(scheduler, "adaptive_long_prefill_threshold", False):
        # Since 0.32 or so a long prompt's chunk may be this long, and decodes may come after it.
        limited = stock_budget // max(len(scheduler.running) + len(own.backlog), 1)
        floor = max(floor, limited)
    if limited and len(chunked) > 1:
        floor *= len(chunked)  # each takes as much before the decodes behind it get anything
    floor += decode_budget
    seats = scheduler.max_num_running_reqs
    active = getattr(scheduler, "max_num_active_reqs", seats)  # since 0.32 or so
    waiting_tokens = int(own.backlog.waiting_tokens * (1.0 - own.backlog.cached_share))
    if not step % cohorts.pp_size:  # no policy looks more often than once a round
        own.kv_free = 1.0 - scheduler.kv_cache_manager.usage
    for request_id in chunked:
        request = requests[request_id]
        waiting_tokens += request.num_tokens - request.num_computed_tokens
    # By position, once a step: names would cost as much as all the rest of this function.
    return PipelineState(
        step,
        own.clock.monotonic(),
        cohorts.pp_size,
        stock_budget,
        floor if floor < stock_budget else stock_budget,
        decode_budget,
        num_ready,
        Lazy(ready_decodes, scheduler, own, step),
        cohorts.in_flight,
        cohorts.recent,
        cohorts.parked_counts(),
        len(own.backlog),
        len(chunked),
        Lazy(waiting_prompts, scheduler, own),
        waiting_tokens,
        own.backlog.arrived_tokens,
        own.kv_free,
        own.timer.totals,
        len(scheduler.running),
        seats if seats < active else active,
    )


def ready_decodes(
    scheduler: Any, own: Controller, step: int, reverse: bool = False
) -> Iterator[Decode]:
    """The decodes that vLLM would schedule in `step`, in its order: oldest admission first."""
    cohorts, first, last = own.cohorts, own.timer.first_token_s, own.timer.last_token_s
    ready, holds = cohorts.ready, cohorts.holds_in_a_row
    for request in reversed(scheduler.running) if reverse else scheduler.running:
        name = request.request_id
        if name in ready and can_decode(request, step):
            yield Decode(
                name,
                request.num_computed_tokens,
                request.num_output_tokens,
                holds.get(name, 0),
                last.get(name, 0.0),
                first.get(name, 0.0),
            )


def can_decode(request: Any, step: int) -> bool:
    """Whether vLLM would schedule this running request's next token in `step`."""
    in_flight = request.num_output_placeholders
    if in_flight and request.num_output_tokens + in_flight >= request.max_tokens:
        return False  # its last token is on its way
    return bool(
        not request.is_prefill_chunk
        and request.next_decode_eligible_step <= step
        and request.num_tokens_with_spec + in_flight > request.num_computed_tokens
    )


def waiting_prompts(scheduler: Any, own: Controller, reverse: bool = False) -> Iterator[Waiting]:
    """Prompts half computed, then those not yet admitted, in vLLM's order.

    Of the latter the part is taken off that the prefix cache will have, as far as one can tell;
    of a prompt that a KV connector loads, all but a token. Streaming sessions between two turns
    hold KV blocks in vLLM's queue, but they are not in the backlog, and not among these.
    """
    now_s, chunked, backlog = own.clock.time(), own.prefilling, own.backlog
    uncached = 1.0 - own.backlog.cached_share
    # 0.31 or so renamed the queue of those that were passed over.
    passed_over = getattr(scheduler, "kv_holding_waiting", None)
    if passed_over is None:
        passed_over = scheduler.skipped_waiting
    admitted = _admitted(scheduler, chunked)
    # Not a list of them all: policies look at the first few, and a priority queue sorts as it goes.
    requests = chain(admitted, passed_over, scheduler.waiting)
    for request in reversed(list(requests)) if reverse else requests:
        computed, running = request.num_computed_tokens, request.request_id in chunked
        if not running and request.request_id not in backlog:
            continue
        new = request.num_tokens - computed
        if not running and (uncached < 1.0 or new < 1):
            new = max(int(new * uncached), 1)
            computed = request.num_tokens - new
        waited_s = max(now_s - request.arrival_time, 0.0)
        yield Waiting(request.request_id, new, computed, waited_s, running)


def new_tokens(result: Mapping[int, Any], request_ids: Set[str]) -> int:
    """Tokens that these requests got from an `update_from_output()`."""
    return sum(
        len(row.new_token_ids)
        for client in result.values()
        for row in client.outputs
        if row.request_id in request_ids
    )


def _admitted(scheduler: Any, chunked: Set[str]) -> list[Any]:
    """The requests whose prompt is being computed, in vLLM's order; the newest ones, mostly."""
    found: list[Any] = []
    if chunked:
        for request in reversed(scheduler.running):
            if request.request_id in chunked:
                found.append(request)
                if len(found) == len(chunked):
                    break
        found.reverse()
    return found


def can_reorder(scheduler: Any) -> bool:
    """Whether the waiting queue is a first come, first served one: priorities are the user's."""
    return isinstance(scheduler.waiting, deque)


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
    # A prompt with one token left is padded by draft tokens; where it has no room nobody enters.
    floor = max(1 + scheduler.num_spec_tokens, config.long_prefill_token_threshold)
    if scheduler.need_mamba_block_aligned_split:
        floor = max(floor, scheduler.cache_config.block_size)
    return int(floor + getattr(scheduler, "num_prefill_lookahead", 0))
