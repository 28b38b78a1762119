"""Even share: at most ceil(decodes alive / pp_size) established decodes in a micro-batch.

The cap follows live demand; vLLM pull request #57433 caps at ceil(max_num_seqs / pp_size), which
leaves half the micro-batches empty at half load.
"""

from collections.abc import Mapping

from vllm_ppbalance.rebalance.choose import most_slack
from vllm_ppbalance.state import PipelineState


class EvenShare:
    """Passes what is over the share on to the next micro-batch, one step at a time."""

    def hold(self, state: PipelineState) -> Mapping[str, int]:
        """The decodes over the share, each for one step."""
        share = -(-state.decodes_alive // state.pp_size)
        if state.num_ready <= share:
            return {}
        # num_ready may count a decode whose last token is in flight; ready does not.
        ready = state.ready
        ghosts = state.num_ready - len(ready)
        share = -(-(state.decodes_alive - ghosts) // state.pp_size)
        return {decode.request_id: 1 for decode in most_slack(ready, max(len(ready) - share, 0))}
