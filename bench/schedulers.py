"""From a policy to a scheduler on vLLM's own, with vLLM's share of the real time measured."""

from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from time import perf_counter
from typing import Any

from bench.baselines import baseline
from bench.sim_spec import SimSpec
from bench.vllm_harness import build_scheduler
from vllm_ppbalance.plugin import stock_scheduler_class
from vllm_ppbalance.scheduler import balanced_class
from vllm_ppbalance.sources import load_settings


@dataclass(slots=True)
class StockTime:
    """Real microseconds of each call inside vLLM's own code."""

    schedule_us: list[float] = field(default_factory=list)
    update_us: list[float] = field(default_factory=list)


class _TimedMixin:
    """Stands between a policy and vLLM's class, so that what is over is the policy's own time."""

    stock_time: StockTime

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.stock_time = StockTime()

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        started = perf_counter()
        output = super().schedule(*args, **kwargs)  # type: ignore[misc]
        self.stock_time.schedule_us.append((perf_counter() - started) * 1e6)
        return output

    def update_from_output(self, *args: Any, **kwargs: Any) -> Any:
        started = perf_counter()
        result = super().update_from_output(*args, **kwargs)  # type: ignore[misc]
        self.stock_time.update_us.append((perf_counter() - started) * 1e6)
        return result


@cache
def _timed(stock: type) -> type:
    return type(f"Timed{stock.__name__}", (_TimedMixin, stock), {})


def make_scheduler(spec: SimSpec, max_model_len: int, profiles: Path | None = None) -> Any:
    """The scheduler that `spec` asks for, with its measured stage times in the folder `profiles`.

    A smaller budget leaves `max_num_batched_tokens` alone, as a plugin would; one above it raises
    ValueError.
    """
    budget = spec.policy.budget
    if budget is not None and budget > spec.max_num_batched_tokens:
        raise ValueError(
            f"policy {spec.policy.name!r}: budget {budget} must be at most "
            f"max_num_batched_tokens = {spec.max_num_batched_tokens}"
        )

    def scheduler_cls(*, vllm_config: Any, **kwargs: Any) -> Any:
        stock = _timed(stock_scheduler_class(vllm_config))
        return _policy_class(spec, stock, profiles)(vllm_config=vllm_config, **kwargs)

    on_gpu = spec.mode == "async"
    scheduler = build_scheduler(
        scheduler_cls,
        pp_size=spec.pp_size,
        async_scheduling=on_gpu,
        v2_model_runner=on_gpu,
        max_num_seqs=spec.max_num_seqs,
        max_num_batched_tokens=spec.max_num_batched_tokens,
        max_model_len=max_model_len,
        block_size=spec.block_size,
        num_gpu_blocks=spec.num_gpu_blocks,
        prefix_caching=spec.prefix_caching,
    )
    if budget is not None:
        scheduler.max_num_scheduled_tokens = budget
    if spec.predictor_scale != 1.0 and hasattr(scheduler, "ppbalance"):
        _skew(scheduler.ppbalance, spec.predictor_scale)
    return scheduler


def _skew(controller: Any, scale: float) -> None:
    """Every answer of the cost models in use becomes `scale` times itself; they learn as ever."""
    use_model = controller.use_model

    def skewed(model: Any) -> Any:
        predict = model.predict
        model.predict = lambda *args: scale * predict(*args)
        return model

    controller.use_model = lambda model, store: use_model(skewed(model), store)
    if controller.cost_model is not None:
        skewed(controller.cost_model)


def _policy_class(spec: SimSpec, stock: type, profiles: Path | None) -> Any:
    policy = spec.policy
    if policy.scheduler != "ours":
        return baseline(policy.scheduler, stock)
    # The targets it is judged by, unless the policy names others. Settings of the environment are
    # left out: a run depends on its spec alone.
    own = {"slo_ttft": spec.slo.ttft_s, "slo_tpot": spec.slo.tpot_s, **policy.settings}
    if profiles is not None:
        own["profiling"] = {**own.get("profiling", {}), "directory": str(profiles)}
    return balanced_class(stock, load_settings({"ppbalance": own}, {}).settings)
