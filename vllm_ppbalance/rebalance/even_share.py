"""Even share: at most ceil(decodes alive / pp_size) established decodes in a micro-batch.

The cap follows live demand; vLLM pull request #57433 caps at ceil(max_num_seqs / pp_size), which
leaves half the micro-batches empty at half load.
"""

from collections.abc import Mapping

from vllm_ppbalance.rebalance.choose import newest_first
from vllm_ppbalance.state import PipelineState

FEW = 16  # decodes up to which one whose last token is in flight matters
TOLERANCE = 32  # a share may be exceeded by its 32nd part: no stage time shows it


class EvenShare:
    """Passes what is over the share on to the next micro-batch, one step at a time."""

    def hold(self, state: PipelineState) -> Mapping[str, int]:
        """The decodes over the share, each for one step."""
        ready, alive = state.num_ready, state.decodes_alive
        share = -(-alive // state.pp_size)
        if ready <= share + share // TOLERANCE:
            return {}
        if ready <= FEW:
            exact = len(state.ready)
            share = -(-(alive - ready + exact) // state.pp_size)
            ready = exact
        return {d.request_id: 1 for d in newest_first(state.ready, max(ready - share, 0))}
