"""Schedulers to compare with, on top of vLLM's own: a fixed budget, a decode cap, P-PAS."""

from collections.abc import Callable
from functools import cache
from typing import Any

from bench.policies import PPAS_PREFILL_CAP


class StaticCapMixin:
    """vLLM pull request #57433 as its description has it, without its code.

    A step takes at most ceil(max_num_seqs / pp_size) established decodes; prompts are not capped.
    It acts only where asynchronous scheduling on Model Runner V2 gives decodes a cadence. The rest
    waits one step and joins the next cohort. Where the pull request would cap decodes resumed from
    the waiting queue too, those pass here: they recompute a prompt first.
    """

    running: list[Any]
    current_step: int
    vllm_config: Any

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """vLLM's schedule(), decodes beyond the cap held back."""
        config = self.vllm_config
        pp_size = config.parallel_config.pipeline_parallel_size
        paced = config.scheduler_config.async_scheduling and config.use_v2_model_runner
        if pp_size > 1 and paced:
            self._hold(-(-config.scheduler_config.max_num_seqs // pp_size))
        return super().schedule(*args, **kwargs)  # type: ignore[misc]

    def _hold(self, cap: int) -> None:
        step, taken = self.current_step + 1, 0
        for request in self.running:
            if _decodes(request, step):
                taken += 1
                if taken > cap:
                    request.next_decode_eligible_step = step + 1


class PPasMixin:
    """Prefill-Pressure Adaptive Scheduling (vLLM issue #52906, arXiv 2608.15171).

    With at least two prompts to compute, running or waiting, and a decode running, the step's
    budget is 2,048 tokens; otherwise it is vLLM's own.
    """

    running: list[Any]
    max_num_scheduled_tokens: int

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """vLLM's schedule() within the budget of the rule."""
        stock = self.max_num_scheduled_tokens
        if self._under_pressure():
            self.max_num_scheduled_tokens = min(PPAS_PREFILL_CAP, stock)
        try:
            return super().schedule(*args, **kwargs)  # type: ignore[misc]
        finally:
            self.max_num_scheduled_tokens = stock

    def _under_pressure(self) -> bool:
        prefilling = sum(_prefilling(request) for request in self.running)
        if prefilling == len(self.running):
            return False  # nobody decodes
        waiting = (request for queue in _waiting_queues(self) for request in queue)
        return prefilling >= 2 or prefilling + sum(map(_prefilling, waiting)) >= 2


def _decodes(request: Any, step: int) -> bool:
    """Whether vLLM would take this running request as a decode in `step`."""
    if request.is_prefill_chunk or step < request.next_decode_eligible_step:
        return False
    in_flight = request.num_output_placeholders
    if in_flight and request.num_output_tokens + in_flight >= request.max_tokens:
        return False
    return bool(request.num_tokens_with_spec + in_flight > request.num_computed_tokens)


def _waiting_queues(scheduler: Any) -> list[Any]:
    """vLLM has two; the second one's name changed between releases."""
    names = ("waiting", "skipped_waiting", "kv_holding_waiting")
    return [getattr(scheduler, name) for name in names if hasattr(scheduler, name)]


def _prefilling(request: Any) -> bool:
    return bool(request.num_computed_tokens < request.num_prompt_tokens)


MIXINS: dict[str, type] = {"static_cap": StaticCapMixin, "ppas": PPasMixin}


def baseline(name: str, stock: type) -> Callable[..., Any]:
    """The scheduler class of a policy name in front of vLLM's `stock` class."""
    return _mixed(MIXINS[name], stock) if name in MIXINS else stock


@cache
def _mixed(mixin: type, stock: type) -> type:
    return type(f"{mixin.__name__.removesuffix('Mixin')}{stock.__name__}", (mixin, stock), {})
