"""The one shape the simulator's parts share: what a micro-batch costs depends on nothing else."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BatchShape:
    """What one micro-batch asks of a stage.

    `prefills` holds (new tokens, tokens already in the KV cache) of each prefill chunk;
    `decode_tokens` exceeds `decodes` when draft tokens are verified; `decode_context` is the sum
    over decodes of the tokens they read.
    """

    prefills: tuple[tuple[int, int], ...] = ()
    decodes: int = 0
    decode_tokens: int = 0
    decode_context: int = 0

    @property
    def prefill_tokens(self) -> int:
        """New prompt tokens in the micro-batch."""
        return sum(new for new, _ in self.prefills)

    @property
    def num_tokens(self) -> int:
        """All tokens in the micro-batch."""
        return self.prefill_tokens + self.decode_tokens
