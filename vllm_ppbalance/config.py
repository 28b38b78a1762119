"""Every setting of the plugin: one frozen pydantic model with units, bounds, and meanings.

Defaults are those of the published systems named in each description.
"""

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from vllm_ppbalance.chunk_settings import ChunkSettings
from vllm_ppbalance.setting import Factor, Ratio, Seconds, Section, Share, Tokens, knob

__all__ = [
    "ChunkSettings",
    "PredictorSettings",
    "ProfilingSettings",
    "RebalanceSettings",
    "Settings",
]

ENV_PREFIX = "PPBALANCE_"  # of the variable that sets a knob


class RebalanceSettings(Section):
    """Which decodes are held back a step so that the micro-batches carry equal work."""

    strategy: Literal["off", "even_share", "threshold", "tiered", "auto"] = knob(
        "auto",
        "",
        "Rule that moves decodes between the micro-batches in flight. `auto` goes by predicted "
        "times and moves none where nothing is won; the others go by counts.",
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


class AdmissionSettings(Section):
    """In which order waiting requests are admitted."""

    strategy: Literal["on_time", "fcfs"] = knob(
        "on_time",
        "",
        "`fcfs`: first come, first served, as vLLM does. `on_time`: the same until not all can "
        "meet `slo_ttft`; then those that can go first, and the fewest possible are put off.",
    )
    late_share: Annotated[float, Field(gt=0.0, le=0.9, allow_inf_nan=False)] = knob(
        0.25,
        "share",
        "`on_time`: of the prompt tokens computed, what goes to requests that were put off.",
    )


class ProfilingSettings(Section):
    """How the cost model of `auto` and of the predictive chunk rules gets its first numbers."""

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
    max_kv_share: Share = knob(0.5, "share", "Largest part of the KV cache that measuring may use.")
    max_age_days: Annotated[float, Field(gt=0.0, le=3650.0, allow_inf_nan=False)] = knob(
        30.0, "days", "Age at which a saved profile is measured anew."
    )
    directory: str | None = knob(
        None, "", "Where profiles are kept; unset for `vllm_ppbalance` in the user's cache."
    )


class PredictorSettings(Section):
    """How fast the cost model learns from serving."""

    forgetting: Annotated[float, Field(ge=0.9, le=1.0, allow_inf_nan=False)] = knob(
        0.9975,
        "share",
        "What is left of an old stage time's weight after each new one like it; at 1 nothing is "
        "forgotten.",
    )
    initial_variance: Factor = knob(
        1.25,
        "variance",
        "How unsure each interference term is at first, against the noise of a stage time: more "
        "makes the first ones count more.",
    )
    error_clip: Share = knob(
        0.4, "x prediction", "A stage time further off than this is learnt from as if this far off."
    )


class Settings(Section):
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
    admission: AdmissionSettings = AdmissionSettings()
    profiling: ProfilingSettings = ProfilingSettings()
    predictor: PredictorSettings = PredictorSettings()

    @property
    def needs_cost_model(self) -> bool:
        """Whether a strategy in use asks for predictions."""
        by_chunk = self.chunk.strategy in ("balanced", "alp", "equal_latency", "spread")
        tiered = self.rebalance.strategy == "tiered" and self.rebalance.base_unit == "auto"
        return by_chunk or tiered or self.rebalance.strategy == "auto"


def all_knobs(model: type[BaseModel] = Settings, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every knob as (dotted name, pydantic field), sections expanded."""
    for name, field in model.model_fields.items():
        annotation = field.annotation
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            yield from all_knobs(annotation, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", field
