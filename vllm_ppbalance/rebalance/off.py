"""No rebalancing: every decode stays in the micro-batch it was born in, as in stock vLLM."""

from collections.abc import Mapping

from vllm_ppbalance.state import PipelineState


class Off:
    """Holds nobody."""

    def hold(self, state: PipelineState) -> Mapping[str, int]:
        """Always empty."""
        return {}
