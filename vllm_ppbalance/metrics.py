"""The `ppbalance_*` series: what each means, and one engine's sums that become their values.

The scheduler only adds plain numbers; they travel with vLLM's own statistics, see `metrics_seam`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from vllm_ppbalance.bubble_estimate import CAUSES

PREFIX = "ppbalance_"
MAX_REASONS = 32  # distinct values of a label; more are counted as "other"
STOCK, FIXED_BUDGET = "stock", "fixed_budget"  # kinds of `ppbalance_fallback`

# Values by series and by the value of its own label ("" without one): counters as what came since
# the last one, so that any number of API servers may each take a part of them.
Payload = dict[str, dict[str, float]]


@dataclass(frozen=True, slots=True)
class Series:
    """One family on the page, without prefix; a counter's name gets `_total` there.

    `label` is its own label beside `model_name` and `engine`.
    """

    name: str
    kind: Literal["counter", "gauge"]
    text: str
    label: str = ""

    @property
    def exported(self) -> str:
        """The name of its samples on the page."""
        return f"{PREFIX}{self.name}{'_total' if self.kind == 'counter' else ''}"


SERIES = (
    Series("token_budget", "gauge", "Token budget of the newest micro-batch, decodes included."),
    Series("target_stage_seconds", "gauge", "Stage time the chunk policy aims at, if any."),
    Series("slo_ttft_seconds", "gauge", "Target for the time to first token."),
    Series("slo_tpot_seconds", "gauge", "Target for the time per output token."),
    Series("cohort_decodes", "gauge", "Decodes in the cohort's newest micro-batch.", "cohort"),
    Series("decode_spread", "gauge", "Widest minus narrowest cohort, in decodes, mean of rounds."),
    Series("held_decodes", "gauge", "Decodes held back at this moment."),
    Series("waiting_prompt_tokens", "gauge", "Prompt tokens of requests not yet admitted."),
    Series("kv_free_ratio", "gauge", "Share of the KV cache that is free."),
    Series("bubble_ratio", "gauge", "Estimated idle share of stage time, newest part.", "cause"),
    Series("prediction_error_ratio", "gauge", "Mean absolute error of predicted stage times."),
    Series("fallback", "gauge", "1 while this part of the plugin is replaced.", "kind"),
    Series("steps", "counter", "Micro-batches that were not empty."),
    Series("tokens", "counter", "Tokens in micro-batches, by kind.", "kind"),
    Series("moves", "counter", "Decodes held back, each counted once per hold."),
    Series("decisions", "counter", "Decisions by the reason that the policy gave.", "reason"),
    Series("stage_samples", "counter", "Stage times that were clear enough to measure."),
    Series("stage_measured_seconds", "counter", "Sum of the measured stage times."),
    Series("predicted_samples", "counter", "Measured stage times that had been predicted."),
    Series("stage_predicted_seconds", "counter", "Sum of the predictions."),
    Series("predicted_measured_seconds", "counter", "Sum of what was measured for them."),
    Series("bubble_seconds", "counter", "Estimated idle seconds of stages.", "cause"),
    Series("work_seconds", "counter", "Seconds of stages with work in the pipeline."),
    Series("overhead_seconds", "counter", "Seconds the plugin spent in the engine's thread."),
    Series("trace_dropped_records", "counter", "Records the step log had no room for."),
)


@dataclass(slots=True)
class Totals:
    """Sums of one engine since its start; `payload` gives the counters as differences."""

    steps: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    stage_samples: int = 0
    stage_measured_s: float = 0.0
    predicted_samples: int = 0
    stage_predicted_s: float = 0.0
    predicted_measured_s: float = 0.0
    spread: int = 0  # summed over rounds
    rounds: int = 0
    reasons: dict[str, int] = field(default_factory=dict)
    _sent: Payload = field(default_factory=dict)
    _sent_spread: tuple[int, int] = (0, 0)

    def decided(self, reason: str) -> None:
        """Count a decision."""
        reasons = self.reasons
        if reason not in reasons and len(reasons) >= MAX_REASONS:
            reason = "other"
        reasons[reason] = reasons.get(reason, 0) + 1

    def measured(self, seconds: float, predicted_s: float | None) -> None:
        """Count a clear stage time, and what had been predicted for it."""
        self.stage_samples += 1
        self.stage_measured_s += seconds
        if predicted_s is not None:
            self.predicted_samples += 1
            self.stage_predicted_s += predicted_s
            self.predicted_measured_s += seconds

    def counters(self) -> Payload:
        """The counters that are kept here, as they stand."""
        return {
            "steps": {"": self.steps},
            "tokens": {"prefill": self.prefill_tokens, "decode": self.decode_tokens},
            "decisions": {reason: float(count) for reason, count in self.reasons.items()},
            "stage_samples": {"": self.stage_samples},
            "stage_measured_seconds": {"": self.stage_measured_s},
            "predicted_samples": {"": self.predicted_samples},
            "stage_predicted_seconds": {"": self.stage_predicted_s},
            "predicted_measured_seconds": {"": self.predicted_measured_s},
        }

    def payload(self, counters: Payload, gauges: Payload) -> Payload:
        """`gauges`, means since the last call, and what was added to `counters` since then."""
        part: Payload = dict(gauges)
        for name, values in counters.items():
            sent = self._sent.get(name, {})
            # Never below 0: a Prometheus counter refuses that.
            part[name] = {k: max(v - sent.get(k, 0.0), 0.0) for k, v in values.items()}
        part["bubble_ratio"] = bubble_ratios(part["bubble_seconds"], part["work_seconds"][""])
        spread, rounds = self._sent_spread
        if self.rounds > rounds:
            part["decode_spread"] = {"": (self.spread - spread) / (self.rounds - rounds)}
        self._sent = {name: dict(values) for name, values in counters.items()}
        self._sent_spread = self.spread, self.rounds
        return part


def bubble_ratios(idle_s: Mapping[str, float], work_s: float) -> dict[str, float]:
    """Idle share by cause; empty where there was no work."""
    return {cause: idle_s[cause] / work_s for cause in CAUSES} if work_s > 0.0 else {}
