"""Token throttling: prefill in proportion to what waits and to the KV cache that is free.

Source: gLLM, "Global Balanced Pipeline Parallelism Systems for Distributed LLMs Serving with Token
Throttling" (SC 2025).
"""

from vllm_ppbalance.config import Settings
from vllm_ppbalance.state import PipelineState


class ThrottleChunk:
    """A share of the waiting prompt tokens, beside an equal share of the decodes.

    `reason` says what bounded the prefill of the last micro-batch.
    """

    def __init__(self, settings: Settings) -> None:
        self._knobs = settings.chunk
        self.reason = ""

    def budget(self, state: PipelineState) -> int | None:
        """Prefill tokens plus live decodes / pp_size; no prefill once only the reserve is free."""
        knobs = self._knobs
        room = (state.kv_free - knobs.throttle_kv_reserve) / (1.0 - knobs.throttle_kv_reserve)
        most = knobs.throttle_max_prefill * max(room, 0.0)
        share = state.prefill_backlog() / knobs.throttle_iterations
        wanted = max(share, knobs.throttle_min_prefill)
        if most < wanted:
            self.reason = "kv room" if most else "kv reserve"
        else:
            self.reason = "backlog" if wanted == share else "least prefill"
        decodes = state.decode_share * state.tokens_per_decode
        return max(decodes + round(min(wanted, most)), 1)
