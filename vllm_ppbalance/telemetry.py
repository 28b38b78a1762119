"""What an operator sees of one engine: sums for the metrics, the step log, and the log lines.

Works on finished micro-batches only, outside `schedule()`. What fails in here is logged once and
ends the metrics and the step log, never the policies.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from vllm_ppbalance import metrics
from vllm_ppbalance.bubble_estimate import CAUSES, BubbleEstimate
from vllm_ppbalance.controller import Controller
from vllm_ppbalance.metrics import Payload, Totals
from vllm_ppbalance.metrics_page import serve_page
from vllm_ppbalance.state import MicroBatch
from vllm_ppbalance.status_line import StatusLine
from vllm_ppbalance.step_timer import Step
from vllm_ppbalance.trace import TraceWriter

logger = logging.getLogger("vllm.ppbalance")

PUBLISH_S = 1.0  # shortest time between two payloads while the engine is busy


class Telemetry:
    """Watches one controller; `own_s` is the plugin's time in the engine's thread, in seconds."""

    def __init__(
        self, own: Controller, trace_path: Path | None = None, max_budget: int | None = None
    ) -> None:
        self.own = own
        self.own_s = 0.0
        self.totals = Totals()
        self.bubbles = BubbleEstimate(own.pp_size)
        self.budget = max_budget  # tokens, of the newest decision
        self.trace = self._open(trace_path, max_budget) if trace_path else None
        self.broken = False
        self.failed = False  # stock scheduling took over
        self._debug = logger.isEnabledFor(logging.DEBUG)
        self._decodes = [0] * own.pp_size
        self._published_s = float("-inf")
        self._strategy = own.settings.chunk.strategy
        self._line = StatusLine(own, self.bubbles)

    def completed(self, step: Step, seconds: float | None, now_s: float) -> None:
        """Note a non-empty micro-batch that came back at `now_s`; `seconds` is its stage time."""
        if step.batch is None or self.broken:
            return
        try:
            self._note(step, step.batch, seconds, now_s)
        except Exception:
            self._break()

    def attach(self, result: Mapping[int, Any], *, failed: bool, idle: bool) -> None:
        """Add our payload to vLLM's statistics, about once a second and when the engine is idle.

        `result` is what `update_from_output()` gives; `failed`: stock scheduling took over.
        """
        self.failed = failed
        if idle or self.own.clock.monotonic() - self._published_s >= PUBLISH_S:
            self._guard(self._attach, result)

    def close(self) -> None:
        """Finish the step log."""
        if self.trace is not None:
            self._guard(self.trace.close)

    def _guard(self, hook: Callable[..., None], *args: Any) -> None:
        if self.broken:
            return
        try:
            hook(*args)
        except Exception:
            self._break()

    def _break(self) -> None:
        self.broken = True
        logger.exception("ppbalance: metrics and step log failed and are off; serving goes on.")

    def _open(self, path: Path, max_budget: int | None) -> TraceWriter:
        own = self.own
        header = {
            "pp_size": own.pp_size,
            "max_num_batched_tokens": max_budget,
            "settings": own.settings.model_dump(mode="json"),
        }
        return TraceWriter(path, header)

    def _note(self, step: Step, batch: MicroBatch, seconds: float | None, now_s: float) -> None:
        own, totals, number = self.own, self.totals, batch.step
        start_s, stage_s = own.timer.last_stage
        prefill = batch.prefill_tokens if batch.prefills else 0
        self.bubbles.completed(start_s, stage_s, now_s, prefill > 0)
        totals.steps += 1
        totals.prefill_tokens += prefill
        totals.decode_tokens += batch.decode_tokens
        decodes, cohort = self._decodes, number % own.pp_size
        decodes[cohort] = batch.num_decodes
        if not cohort:
            totals.spread += max(decodes) - min(decodes)
            totals.rounds += 1
        decision = step.decision
        reason = "steady" if decision is None else decision.reason or self._strategy
        if decision is not None:
            self.budget = decision.budget
        totals.decided(reason)
        predicted_s = None
        if own.cost_model is not None and own.predicts and (seconds or self.trace is not None):
            predicted_s = own.predict(batch)
        if seconds is not None:
            totals.measured(seconds, predicted_s)
        if self.trace is not None:
            self._write(self.trace, step, batch, (now_s, stage_s, seconds, predicted_s), reason)
        if self._debug:
            self._log_decision(step, batch, reason)
        if now_s >= self._line.due_s:
            self._line.log(now_s, self.budget, decodes)

    def _write(
        self,
        trace: TraceWriter,
        step: Step,
        batch: MicroBatch,
        times_s: tuple[float, float, float | None, float | None],
        reason: str,
    ) -> None:
        own, decision = self.own, step.decision
        now_s, stage_s, seconds, predicted_s = times_s
        trace.append(
            (
                batch.step,
                step.submitted_s,
                own.timer.last_stage[0],
                now_s,
                stage_s,
                0 if seconds is None else 1,
                predicted_s,
                None if decision is None else decision.budget,
                reason,
                batch.num_decodes,
                batch.decode_tokens,
                batch.decode_context,
                batch.prefills,
                0 if decision is None else len(decision.hold),
                len(own.backlog),
                own.backlog.waiting_tokens,
                own.kv_free,
                *own.timer.totals,
            )
        )

    def _log_decision(self, step: Step, batch: MicroBatch, reason: str) -> None:
        decision = step.decision
        logger.debug(
            "ppbalance: step %d, budget %s (%s), %d prompt tokens, %d decodes, %d held.",
            batch.step,
            "stock" if decision is None else decision.budget,
            reason,
            batch.prefill_tokens,
            batch.num_decodes,
            0 if decision is None else len(decision.hold),
        )

    def _attach(self, result: Mapping[int, Any]) -> None:
        self._published_s = self.own.clock.monotonic()
        if not self.own.settings.metrics:
            return
        for outputs in result.values():
            # vLLM gives its statistics to one of its API servers; None where they are disabled.
            if outputs.scheduler_stats is not None:
                payload = self.totals.payload(self.counters(), self.gauges())
                outputs.scheduler_stats.ppbalance = payload

    def counters(self) -> Payload:
        """All counters as they stand."""
        own, bubbles = self.own, self.bubbles
        return self.totals.counters() | {
            "moves": {"": own.num_moves},
            "bubble_seconds": dict(zip(CAUSES, bubbles.idle_s, strict=True)),
            "work_seconds": {"": bubbles.work_s},
            "overhead_seconds": {"": self.own_s},
            "trace_dropped_records": {"": self.trace.dropped if self.trace else 0},
        }

    def gauges(self) -> Payload:
        """All gauges but the means over time."""
        own, settings = self.own, self.own.settings
        model, target_s = own.cost_model, getattr(own.chunk, "target_s", None)
        gauges: Payload = {
            "slo_ttft_seconds": {"": settings.slo_ttft},
            "slo_tpot_seconds": {"": settings.slo_tpot},
            "cohort_decodes": {str(i): float(n) for i, n in enumerate(self._decodes)},
            "held_decodes": {"": float(sum(own.cohorts.parked_counts().values()))},
            "waiting_prompt_tokens": {"": float(own.backlog.waiting_tokens)},
            "kv_free_ratio": {"": own.kv_free},
            "fallback": {
                metrics.STOCK: float(self.failed),
                metrics.FIXED_BUDGET: float(model is not None and not own.predicts),
            },
        }
        if self.budget is not None:
            gauges["token_budget"] = {"": float(self.budget)}
        if target_s is not None:
            gauges["target_stage_seconds"] = {"": float(target_s)}
        if model is not None:
            gauges["prediction_error_ratio"] = {"": model.trust.mean_error}
        return gauges


def start_telemetry(own: Controller, vllm_config: Any) -> Telemetry | None:
    """What the settings ask for; None, with one warning, where that fails.

    Data parallel ranks but the first add theirs to the step log's name and to the port.
    """
    settings = own.settings
    # Dense models keep no other trace of their rank in the engine's configuration.
    rank = getattr(vllm_config.parallel_config, "data_parallel_index", 0)
    path = Path(settings.trace) if settings.trace else None
    if path is not None and rank:
        path = path.with_name(f"{path.name}.dp{rank}")
    try:
        telemetry = Telemetry(own, path, vllm_config.scheduler_config.max_num_batched_tokens)
        if settings.metrics_port is not None:
            serve_page(telemetry, settings.metrics_port + rank)
    except Exception as error:
        logger.warning("ppbalance: no metrics and no step log: %r. Serving goes on.", error)
        return None
    return telemetry
