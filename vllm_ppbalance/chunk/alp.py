"""Adaptive latency predictor: the smallest chunk whose predicted throughput meets the demand.

Source: "Revisiting Pipeline Parallelism for LLM Serving" (OSDI 2026), ALP chunk control.
"""

from collections import deque
from collections.abc import Sequence
from math import inf

from vllm_ppbalance.chunk.guards import at_least_requests, low_kv_chunk, why_fallback
from vllm_ppbalance.config import Settings
from vllm_ppbalance.cost_model import CostModel
from vllm_ppbalance.state import PipelineState, Waiting


class AlpChunk:
    """Decides every 2 * pp_size steps, from the waiting prompts and the cost model.

    Without a trusted cost model every micro-batch gets `fallback_tokens`. `reason` says what the
    last decision followed from.
    """

    def __init__(self, settings: Settings, cost_model: CostModel | None) -> None:
        self._settings = settings
        self._model = cost_model
        self._candidates = settings.chunk.candidates()
        self._chunk = settings.chunk.fallback_tokens
        self._saved_chunk: int | None = None  # while KV is short: the chunk to go back to
        self._next_step = 0
        self.reason = ""
        self._arrivals: deque[tuple[float, int]] = deque()  # (time, prompt tokens so far)

    def budget(self, state: PipelineState) -> int | None:
        """The chunk, never below what the fullest recent micro-batch's requests need."""
        fallback = why_fallback(self._model)
        if self._model is None or fallback:
            self.reason = fallback
            self._next_step, self._saved_chunk = 0, None
            self._chunk = self._settings.chunk.fallback_tokens
        elif state.step >= self._next_step:
            self._next_step = state.step + 2 * state.pp_size
            self._decide(self._model, state)
        return at_least_requests(self._chunk, state)

    def _decide(self, model: CostModel, state: PipelineState) -> None:
        arriving = self._arrival_rate(state)
        if state.kv_free < self._settings.chunk.kv_free_threshold:
            if self._saved_chunk is None:
                self._saved_chunk = self._chunk
            self._chunk, self.reason = low_kv_chunk(state), "low kv"
            return
        if self._saved_chunk is not None:
            self._chunk, self._saved_chunk = self._saved_chunk, None
        waiting = state.waiting if state.num_waiting or state.num_prefilling else ()
        self.reason = "nothing waits"
        if waiting:
            self._chunk = self._choose(model, state, waiting, self._required(waiting, arriving))

    def _required(self, waiting: Sequence[Waiting], arriving: float) -> float:
        """Prompt tokens a second that keep every stale prompt within its TTFT, and the inflow."""
        knobs, slo_ttft = self._settings.chunk, self._settings.slo_ttft
        stale = [w for w in waiting if w.waited_s >= knobs.alp_fresh_epsilon * slo_ttft]
        rate = 0.0
        if stale:
            left_s = slo_ttft - sum(w.waited_s for w in stale) / len(stale)
            tokens = sum(w.new_tokens for w in stale)
            rate = tokens / left_s if left_s > self._settings.slo_tpot else inf
        return knobs.alp_throughput_coeff * (rate + arriving)

    def _choose(
        self, model: CostModel, state: PipelineState, waiting: Sequence[Waiting], required: float
    ) -> int:
        """First candidate that is fast enough, else the largest that keeps TPOT, else the least."""
        longest_s = self._settings.chunk.alp_slo_tpot_coeff * self._settings.slo_tpot
        decodes = state.decodes_alive / state.pp_size
        context, taken = decodes * state.mean_context, decodes * state.tokens_per_decode
        load = (int(taken), int(decodes), int(context))
        safe = 0
        for chunk in self._candidates:
            seconds = _mean_seconds(model, state.pp_size, chunk, load, waiting)
            if seconds * state.pp_size > longest_s:
                self.reason = "tpot bound" if safe else "tpot bound: none keeps it"
                return safe or chunk
            safe = chunk
            if (chunk - taken) / seconds >= required:
                self.reason = "demand"
                return chunk
        self.reason = "largest candidate"
        return safe

    def _arrival_rate(self, state: PipelineState) -> float:
        """Prompt tokens a second over the window, from the count at its start."""
        window_s, seen = self._settings.chunk.alp_window_s, self._arrivals
        seen.append((state.now_s, state.arrived_tokens))
        while len(seen) > 1 and seen[1][0] <= state.now_s - window_s:
            seen.popleft()
        return (state.arrived_tokens - seen[0][1]) / window_s


def _mean_seconds(
    model: CostModel,
    pp_size: int,
    chunk: int,
    load: tuple[int, int, int],
    waiting: Sequence[Waiting],
) -> float:
    """Mean stage time of the next pp_size micro-batches, the queue packed into them in order.

    `load` is the decodes' tokens, their number and context. A micro-batch the queue does not fill
    still counts as `chunk` tokens.
    """
    taken, decodes, context = load
    total, index, done = 0.0, 0, 0
    for _ in range(pp_size):
        room, prefills = chunk - taken, []
        while room > 0 and index < len(waiting):
            prompt = waiting[index]
            new = min(room, prompt.new_tokens - done)
            if new > 0:
                prefills.append((new, prompt.prefix_tokens + done))
                room -= new
                done += new
            if done >= prompt.new_tokens:
                index, done = index + 1, 0
        total += model.predict(chunk, prefills, decodes, context)
    return total / pp_size
