"""Every setting of the plugin: one frozen pydantic model with units, bounds, and meanings.

Defaults are those of the published systems named in each description.
"""

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

Tokens = Annotated[int, Field(ge=1, le=1_048_576)]
Ratio = Annotated[float, Field(ge=0.0, le=1.0, allow_inf_nan=False)]
Seconds = Annotated[float, Field(gt=0.0, le=3600.0, allow_inf_nan=False)]
Factor = Annotated[float, Field(gt=0.0, le=100.0, allow_inf_nan=False)]


def knob(default: Any, unit: str, text: str, published: str = "", **bounds: Any) -> Any:
    """A field with its unit, and the published flag it stands for where there is one."""
    extra: dict[str, Any] = {"unit": unit, "published": published}
    return Field(default, description=text, json_schema_extra=extra, **bounds)


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, validate_default=True)


class ChunkSettings(_Section):
    """How many tokens a micro-batch may hold, decodes included."""

    strategy: Literal["fixed", "greedy", "alp", "equal_latency", "throttle", "spread"] = knob(
        "greedy", "", "Rule that chooses the chunk size, the token budget of a micro-batch."
    )
    fixed_tokens: Tokens | None = knob(
        None, "tokens", "`fixed`: the budget; unset leaves vLLM's own `max_num_batched_tokens`."
    )
    kv_free_threshold: Ratio = knob(
        0.10, "share", "Free share of the KV cache under which the chunk shrinks to a safe size."
    )
    greedy_min_chunk: Tokens = knob(128, "tokens", "`greedy`: smallest chunk, and the first one.")
    greedy_base_chunk: Tokens = knob(128, "tokens", "`greedy`: step by which the chunk changes.")
    greedy_max_chunk: Tokens = knob(2048, "tokens", "`greedy`: largest chunk.")
    tpot_violation_ratio: Factor = knob(
        1.08, "x slo_tpot", "`greedy`: a mean token gap above this shrinks the chunk."
    )
    ttft_low_ratio: Factor = knob(
        0.1, "x slo_ttft", "`greedy`: a mean TTFT below this shrinks the chunk."
    )
    ttft_high_ratio: Factor = knob(
        0.3, "x slo_ttft", "`greedy`: a mean TTFT above this may grow the chunk."
    )
    tpot_safe_ratio: Factor = knob(
        0.85, "x slo_tpot", "`greedy`: the chunk grows only while the mean token gap is below this."
    )

    fallback_tokens: Tokens = knob(
        512,
        "tokens",
        "`alp`, `spread`: the budget while there is no cost model to trust. On two H200, of the "
        "fixed budgets tried, 512 was best at 9 requests a second.",
    )
    alp_chunk_min: Tokens = knob(128, "tokens", "`alp`: smallest candidate.")
    alp_chunk_max: Tokens = knob(2048, "tokens", "`alp`: largest candidate.")
    alp_chunk_step: Tokens = knob(128, "tokens", "`alp`: distance between two candidates.")
    chunk_candidates: Annotated[tuple[Tokens, ...], Field(max_length=256)] = knob(
        (),
        "tokens",
        "`alp`: the candidates, ascending; empty for those from `alp_chunk_min` to "
        "`alp_chunk_max` by `alp_chunk_step`.",
        published="--chunk-candidates",
        strict=False,
    )
    alp_fresh_epsilon: Ratio = knob(
        0.25, "x slo_ttft", "`alp`: a prompt that has waited this long is stale: it has a deadline."
    )
    alp_window_s: Seconds = knob(
        10.0, "s", "`alp`: time over which the inflow of prompt tokens is averaged."
    )
    alp_throughput_coeff: Factor = knob(
        1.0, "x demand", "`alp`: throughput asked for, above 1 for more than the demand."
    )
    alp_slo_tpot_coeff: Factor = knob(
        1.05, "x slo_tpot", "`alp`: longest predicted time once round the pipeline."
    )
    equal_first_chunk: Tokens | None = knob(
        None,
        "tokens",
        "`equal_latency`: a prompt's first chunk, which the later ones are to equal in time; "
        "unset for vLLM's own `max_num_batched_tokens`.",
        published="--chunked-prefill-size",
    )
    equal_smooth_factor: Ratio = knob(
        0.75,
        "share",
        "`equal_latency`: how much of the computed change of the chunk is made.",
        published="SGLANG_DYNAMIC_CHUNKING_SMOOTH_FACTOR",
    )
    equal_min_ratio: Annotated[float, Field(gt=0.0, le=1.0, allow_inf_nan=False)] = knob(
        0.25, "x first chunk", "`equal_latency`: smallest chunk."
    )
    equal_alignment: Tokens = knob(
        64, "tokens", "`equal_latency`: chunks are multiples of this; at least a KV block."
    )
    equal_prefix_ratio: Annotated[float, Field(gt=0.0, le=1.0, allow_inf_nan=False)] = knob(
        0.2, "share", "`equal_latency`: most of a chunk's time that may go to reading its prefix."
    )
    equal_tail_ratio: Ratio = knob(
        0.25,
        "x chunk",
        "`equal_latency`: a rest smaller than this joins the chunk before it, or shares with it.",
    )
    throttle_iterations: Annotated[int, Field(ge=1, le=4096)] = knob(
        8,
        "micro-batches",
        "`throttle`: over how many the waiting prompt tokens are spread.",
        published="--iterp",
    )
    throttle_min_prefill: Tokens = knob(
        32, "tokens", "`throttle`: least prefill in a micro-batch.", published="--minp"
    )
    throttle_max_prefill: Tokens = knob(
        8192,
        "tokens",
        "`throttle`: most prefill in a micro-batch, with the KV cache empty.",
        published="--maxp",
    )
    throttle_kv_reserve: Annotated[float, Field(ge=0.0, lt=1.0, allow_inf_nan=False)] = knob(
        0.05,
        "share",
        "`throttle`: free share of the KV cache at which prefill stops.",
        published="--kvthresh",
    )
    spread_rounds: Annotated[int, Field(ge=1, le=4096)] = knob(
        4, "rounds", "`spread`: over how many rounds of the pipeline the waiting prompts go."
    )
    spread_throughput_ratio: Ratio = knob(
        0.94, "share", "`spread`: the cap is where prefill throughput reaches this of its best."
    )
    spread_tpot_ratio: Factor = knob(
        0.8, "x slo_tpot", "`spread`: longest predicted time once round the pipeline."
    )
    spread_min_chunk: Tokens = knob(128, "tokens", "`spread`: smallest chunk.")

    def candidates(self) -> tuple[int, ...]:
        """The chunk sizes `alp` chooses from, ascending."""
        if self.chunk_candidates:
            return self.chunk_candidates
        return tuple(range(self.alp_chunk_min, self.alp_chunk_max + 1, self.alp_chunk_step))

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        for low, high in (
            ("greedy_min_chunk", "greedy_max_chunk"),
            ("alp_chunk_min", "alp_chunk_max"),
            ("ttft_low_ratio", "ttft_high_ratio"),
        ):
            least, most = getattr(self, low), getattr(self, high)
            if least > most:
                raise ValueError(f"{low} = {least} must be at most {high} = {most}")
        if list(self.chunk_candidates) != sorted(set(self.chunk_candidates)):
            raise ValueError(f"chunk_candidates = {self.chunk_candidates} must be ascending")
        return self


class RebalanceSettings(_Section):
    """Which decodes are held back a step so that the micro-batches carry equal work."""

    strategy: Literal["off", "even_share", "threshold", "tiered", "auto"] = knob(
        "even_share", "", "Rule that moves decodes between the micro-batches in flight."
    )
    delay_threshold: int = knob(
        4,
        "decodes",
        "`threshold`: smallest difference between the fullest and the emptiest micro-batch "
        "that is evened out.",
        published="--delay-sched-threshold",
        ge=1,
        le=65_536,
    )
    base_unit: Tokens | Literal["auto"] = knob(
        128,
        "tokens",
        "`tiered`: the GPU's tile: a micro-batch just over a multiple of it costs a step more. "
        "`auto` reads it off the measured stage times, and takes 128 where they show none.",
    )
    load_alpha: Ratio = knob(
        0.4,
        "share",
        "`tiered`: how far over a multiple of the tile the mean micro-batch may be and still be "
        "held down to it, of a tile.",
    )
    waiting_tok_threshold: Annotated[int, Field(ge=0, le=1 << 30)] = knob(
        1024, "tokens", "`tiered`: with more prompt tokens waiting nobody is held down to a tile."
    )
    mode: Literal["auto", "tpot_first", "e2e_first"] = knob(
        "auto",
        "",
        "`tiered`: whom to hold: the oldest decodes (`tpot_first`), the newest (`e2e_first`), or "
        "the newest until the mean token gap is near `slo_tpot`.",
    )
    tpot_first_ratio: Factor = knob(
        0.9, "x slo_tpot", "`tiered`: mean token gap from which mode `auto` is `tpot_first`."
    )
    margin: Annotated[float, Field(ge=0.001, le=1.0, allow_inf_nan=False)] = knob(
        0.005,
        "share",
        "`auto`: smallest predicted gain of the time once round the pipeline that is worth holding "
        "decodes for.",
    )


class ProfilingSettings(_Section):
    """How the cost model of `alp`, `equal_latency` and `spread` gets its first numbers."""

    mode: Literal["auto", "always", "off"] = knob(
        "auto",
        "",
        "`auto`: use the saved profile of this deployment, or measure one at start; `always`: "
        "measure at every start; `off`: measure nothing: start from the saved profile, or from the "
        "model's shape, and learn from serving.",
    )
    warmups: Annotated[int, Field(ge=0, le=100)] = knob(
        3, "micro-batches", "Of each size at start, not counted."
    )
    repeats: Annotated[int, Field(ge=1, le=100)] = knob(
        5, "micro-batches", "Of each size at start, measured."
    )
    max_seconds: Seconds = knob(30.0, "s", "Longest time for measuring at start.")
    max_kv_share: Annotated[float, Field(gt=0.0, le=1.0, allow_inf_nan=False)] = knob(
        0.5, "share", "Largest part of the KV cache that measuring may use."
    )
    max_age_days: Annotated[float, Field(gt=0.0, le=3650.0, allow_inf_nan=False)] = knob(
        30.0, "days", "Age at which a saved profile is measured anew."
    )
    directory: str | None = knob(
        None, "", "Where profiles are kept; unset for `vllm_ppbalance` in the user's cache."
    )


class Settings(_Section):
    """All settings. Sources are read in `sources.py`."""

    slo_ttft: Seconds = knob(2.0, "s", "Target for the time to first token.")
    slo_tpot: Seconds = knob(0.2, "s", "Target for the time per output token after the first.")
    trace: str | None = knob(
        None, "", "File that gets a line for every micro-batch (the step log); unset for none."
    )
    metrics: bool = knob(True, "", "Add the `ppbalance_*` series to vLLM's own `/metrics` page.")
    metrics_port: Annotated[int, Field(ge=1, le=65_535)] | None = knob(
        None,
        "",
        "A page of their own for the same series, on this port of localhost, where vLLM's page "
        "cannot be used; unset for none.",
    )
    chunk: ChunkSettings = ChunkSettings()
    rebalance: RebalanceSettings = RebalanceSettings()
    profiling: ProfilingSettings = ProfilingSettings()

    @property
    def needs_cost_model(self) -> bool:
        """Whether a strategy in use asks for predictions."""
        by_chunk = self.chunk.strategy in ("alp", "equal_latency", "spread")
        tiered = self.rebalance.strategy == "tiered" and self.rebalance.base_unit == "auto"
        return by_chunk or tiered or self.rebalance.strategy == "auto"
