"""What several chunk policies share: room for decodes, the published low-memory rule and guard."""

from operator import attrgetter

from vllm_ppbalance.cost_model import CostModel
from vllm_ppbalance.state import PipelineState

NUM_REQUESTS = attrgetter("num_requests")
TILE = 128  # the published granularity of the guard and of the low-memory rule, tokens


def at_least_requests(chunk: int, state: PipelineState) -> int:
    """`chunk`, or the next multiple of 128 above the requests of the fullest recent micro-batch."""
    fullest = 0
    for batch in state.recent:
        if batch.num_requests > fullest:
            fullest = batch.num_requests
    return max(chunk, -(-(fullest + 1) // TILE) * TILE)


def low_kv_chunk(state: PipelineState) -> int:
    """The chunk while KV blocks are short: about the requests of the emptiest micro-batch."""
    emptiest = min(map(NUM_REQUESTS, state.recent), default=0)
    return ((emptiest + TILE // 2) // TILE + 1) * TILE


def why_fallback(model: CostModel | None) -> str:
    """Why a policy must give its fixed budget and not follow `model`; empty if it need not."""
    health = "there is no cost model" if model is None else model.health
    return f"fallback: {health}" if health else ""
