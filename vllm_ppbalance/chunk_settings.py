"""Settings of the chunk policies. Defaults are those of the published systems they name."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from vllm_ppbalance.setting import Factor, Ratio, Seconds, Section, Share, Tokens, knob


class ChunkSettings(Section):
    """How many tokens a micro-batch may hold, decodes included."""

    strategy: Literal[
        "balanced", "fixed", "greedy", "alp", "equal_latency", "throttle", "spread"
    ] = knob("balanced", "", "Rule that chooses the chunk size, the token budget of a micro-batch.")
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
        "`balanced`, `alp`, `spread`: the budget while there is no cost model to trust. On two "
        "H200, of the fixed budgets tried, 512 was best at 9 requests a second.",
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
    equal_min_ratio: Share = knob(0.25, "x first chunk", "`equal_latency`: smallest chunk.")
    equal_alignment: Tokens = knob(
        64, "tokens", "`equal_latency`: chunks are multiples of this; at least a KV block."
    )
    equal_prefix_ratio: Share = knob(
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
    balanced_rounds: Annotated[int, Field(ge=1, le=4096)] = knob(
        4, "rounds", "`balanced`: over how many rounds of the pipeline the prompts at hand go."
    )
    balanced_throughput_ratio: Ratio = knob(
        0.9,
        "share",
        "`balanced`: without a deadline in sight, the budget is no larger than it takes for this "
        "of the best prefill throughput.",
    )
    balanced_deadline_ratio: Share = knob(
        0.5, "x slo_ttft", "`balanced`: wait by which prompts should be computed, in a burst too."
    )
    balanced_tpot_ratio: Factor = knob(
        0.95, "x slo_tpot", "`balanced`: longest predicted time once round the pipeline."
    )
    balanced_min_chunk: Tokens = knob(128, "tokens", "`balanced`: smallest chunk.")

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
