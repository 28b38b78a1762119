"""Spread: the waiting prompt tokens evenly over the next rounds, no more than pays."""

from vllm_ppbalance.chunk.guards import why_fallback
from vllm_ppbalance.config import Settings
from vllm_ppbalance.cost_model import CostModel
from vllm_ppbalance.state import PipelineState

# Budgets the cap is chosen from, as multiples of `spread_min_chunk`: fine where stage time bends.
STEPS = (*range(1, 17), 20, 24, 28, 32, 40, 48, 56, 64)


class SpreadChunk:
    """Waiting prefill tokens / (rounds * pp_size) a micro-batch, beside its share of decodes.

    The cap is the smallest budget whose prefill throughput reaches a share of the best one, and
    under it the largest whose stage time * pp_size keeps a share of the TPOT target. Without a
    trusted cost model every micro-batch gets `fallback_tokens`. `reason` says which of these it
    was.
    """

    def __init__(self, settings: Settings, cost_model: CostModel | None) -> None:
        self._settings = settings
        self._model = cost_model
        self._cap = settings.chunk.fallback_tokens
        self._next_step = 0
        self.reason = ""

    def budget(self, state: PipelineState) -> int | None:
        """Tokens for this micro-batch; the cap is renewed every pp_size steps."""
        knobs = self._settings.chunk
        fallback = why_fallback(self._model)
        if self._model is None or fallback:
            self.reason = fallback
            return knobs.fallback_tokens
        decodes = state.decode_share
        if state.step >= self._next_step:
            self._next_step = state.step + state.pp_size
            self._cap = self._best_cap(self._model, state, decodes)
        rounds = knobs.spread_rounds * state.pp_size
        wanted = decodes * state.tokens_per_decode - int(-state.prefill_backlog() // rounds)
        if wanted < knobs.spread_min_chunk:
            self.reason = "smallest chunk"
        else:
            self.reason = "backlog" if wanted <= self._cap else "throughput cap"
        return max(min(wanted, self._cap), knobs.spread_min_chunk)

    def _best_cap(self, model: CostModel, state: PipelineState, decodes: int) -> int:
        knobs = self._settings.chunk
        context, taken = int(decodes * state.mean_context), decodes * state.tokens_per_decode
        least_s = knobs.spread_tpot_ratio * self._settings.slo_tpot / state.pp_size
        caps: list[tuple[int, float]] = []  # (budget, prefill tokens a second)
        for step in STEPS:
            tokens = step * knobs.spread_min_chunk
            if tokens > state.max_budget:
                break
            if tokens <= taken:
                continue
            seconds = model.predict(tokens, ((tokens - taken, 0),), decodes, context)
            if caps and seconds > least_s:
                break
            caps.append((tokens, (tokens - taken) / seconds))
        if not caps:
            return state.max_budget
        enough = knobs.spread_throughput_ratio * max(rate for _, rate in caps)
        return next(tokens for tokens, rate in caps if rate >= enough)
