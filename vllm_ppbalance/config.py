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

    strategy: Literal["fixed", "greedy"] = knob(
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

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.greedy_min_chunk > self.greedy_max_chunk:
            raise ValueError(
                f"greedy_min_chunk = {self.greedy_min_chunk} must be at most "
                f"greedy_max_chunk = {self.greedy_max_chunk}"
            )
        if self.ttft_low_ratio > self.ttft_high_ratio:
            raise ValueError(
                f"ttft_low_ratio = {self.ttft_low_ratio} must be at most "
                f"ttft_high_ratio = {self.ttft_high_ratio}"
            )
        return self


class RebalanceSettings(_Section):
    """Which decodes are held back a step so that the micro-batches carry equal work."""

    strategy: Literal["off", "even_share", "threshold"] = knob(
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


class Settings(_Section):
    """All settings. Sources are read in `sources.py`."""

    slo_ttft: Seconds = knob(2.0, "s", "Target for the time to first token.")
    slo_tpot: Seconds = knob(0.2, "s", "Target for the time per output token after the first.")
    chunk: ChunkSettings = ChunkSettings()
    rebalance: RebalanceSettings = RebalanceSettings()
