"""Chunk policies, one a file: how many tokens the next micro-batch may hold."""

from vllm_ppbalance.chunk.fixed import FixedChunk
from vllm_ppbalance.chunk.greedy import GreedyChunk
from vllm_ppbalance.config import Settings
from vllm_ppbalance.state import ChunkPolicy


def make_chunk_policy(settings: Settings) -> ChunkPolicy:
    """The policy that `chunk.strategy` names."""
    match settings.chunk.strategy:
        case "fixed":
            return FixedChunk(settings.chunk.fixed_tokens)
        case "greedy":
            return GreedyChunk(settings)
