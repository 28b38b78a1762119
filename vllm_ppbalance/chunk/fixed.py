"""A fixed token budget: vLLM's own, or one number for all micro-batches."""

from vllm_ppbalance.state import PipelineState


class FixedChunk:
    """Gives every micro-batch `tokens`, or leaves vLLM's budget when that is None."""

    def __init__(self, tokens: int | None) -> None:
        self._tokens = tokens

    def budget(self, state: PipelineState) -> int | None:
        """The same number at every step."""
        return self._tokens
