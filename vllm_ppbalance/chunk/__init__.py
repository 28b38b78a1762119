"""Chunk policies, one a file: how many tokens the next micro-batch may hold."""

from typing import assert_never

from vllm_ppbalance.chunk.alp import AlpChunk
from vllm_ppbalance.chunk.balanced import BalancedChunk
from vllm_ppbalance.chunk.equal_latency import EqualLatencyChunk
from vllm_ppbalance.chunk.fixed import FixedChunk
from vllm_ppbalance.chunk.greedy import GreedyChunk
from vllm_ppbalance.chunk.spread import SpreadChunk
from vllm_ppbalance.chunk.throttle import ThrottleChunk
from vllm_ppbalance.config import Settings
from vllm_ppbalance.cost_model import CostModel
from vllm_ppbalance.prefill_rates import PrefillRates
from vllm_ppbalance.state import ChunkPolicy


def make_chunk_policy(
    settings: Settings, cost_model: CostModel | None = None, rates: PrefillRates | None = None
) -> ChunkPolicy:
    """The policy that `chunk.strategy` names.

    `balanced`, `alp`, `equal_latency` and `spread` ask `cost_model` and give a fixed budget while
    there is none, or none to trust.
    """
    match settings.chunk.strategy:
        case "fixed":
            return FixedChunk(settings.chunk.fixed_tokens)
        case "greedy":
            return GreedyChunk(settings)
        case "alp":
            return AlpChunk(settings, cost_model)
        case "equal_latency":
            return EqualLatencyChunk(settings, cost_model)
        case "throttle":
            return ThrottleChunk(settings)
        case "balanced":
            return BalancedChunk(settings, cost_model, rates)
        case "spread":
            return SpreadChunk(settings, cost_model)
        case unknown:
            assert_never(unknown)
