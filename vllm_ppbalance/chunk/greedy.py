"""The greedy rule: shrink the chunk when token gaps grow too long, grow it when TTFT does.

Source: "Revisiting Pipeline Parallelism for LLM Serving" (OSDI 2026), greedy chunk control.
"""

from vllm_ppbalance.chunk.guards import at_least_requests, low_kv_chunk
from vllm_ppbalance.config import Settings
from vllm_ppbalance.state import LatencyTotals, PipelineState


class GreedyChunk:
    """One step up or down every pp_size micro-batches, from the latencies seen in between."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self.reason = "keep"  # why the chunk is what it is, one word
        self._chunk = settings.chunk.greedy_min_chunk
        self._saved_chunk: int | None = None  # while KV is short: the chunk to go back to
        self._next_step = 0
        self._seen: LatencyTotals | None = None

    def budget(self, state: PipelineState) -> int | None:
        """The chunk, never below what the fullest recent micro-batch's requests need."""
        if self._seen is None:  # what another policy left behind says nothing of this one
            self._seen = state.totals
        if state.step >= self._next_step:
            self._next_step = state.step + state.pp_size
            self._decide(state, self._seen)
        return at_least_requests(self._chunk, state)

    def _decide(self, state: PipelineState, seen: LatencyTotals) -> None:
        knobs = self._settings.chunk
        if state.kv_free < knobs.kv_free_threshold:
            if self._saved_chunk is None:
                self._saved_chunk = self._chunk
            self._chunk, self.reason = low_kv_chunk(state), "low_kv"
            return
        if self._saved_chunk is not None:
            self._chunk, self._saved_chunk = self._saved_chunk, None
            self.reason = "keep"
        window = state.totals.since(seen)
        if window.mean_ttft_s is None:
            return
        self._seen = state.totals
        self._move(window.mean_ttft_s, window.mean_gap_s or 0.0)

    def _move(self, ttft_s: float, gap_s: float) -> None:
        knobs = self._settings.chunk
        slo_ttft, slo_tpot = self._settings.slo_ttft, self._settings.slo_tpot
        self.reason = "keep"
        too_slow = gap_s > knobs.tpot_violation_ratio * slo_tpot
        if too_slow or ttft_s < knobs.ttft_low_ratio * slo_ttft:
            self.reason = "shrink_for_gaps" if too_slow else "shrink_ttft_is_low"
            self._chunk = max(self._chunk - knobs.greedy_base_chunk, knobs.greedy_min_chunk)
        elif ttft_s > knobs.ttft_high_ratio * slo_ttft and gap_s < knobs.tpot_safe_ratio * slo_tpot:
            self.reason = "grow_for_ttft"
            self._chunk = min(self._chunk + knobs.greedy_base_chunk, knobs.greedy_max_chunk)
