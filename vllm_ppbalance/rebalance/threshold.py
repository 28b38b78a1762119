"""Threshold delay scheduling: move half the difference from the fullest to the emptiest cohort.

Source: "Revisiting Pipeline Parallelism for LLM Serving" (OSDI 2026), delay scheduling.
"""

from collections.abc import Mapping

from vllm_ppbalance.rebalance.choose import newest_first
from vllm_ppbalance.state import PipelineState


class Threshold:
    """Acts when the cohort about to run is the fullest, `delay_threshold` over the emptiest."""

    def __init__(self, delay_threshold: int) -> None:
        self._delay_threshold = delay_threshold

    def hold(self, state: PipelineState) -> Mapping[str, int]:
        """Half the difference, held until the emptiest cohort's step: forward only."""
        if state.pp_size < 2:  # a stage that is measured alone
            return {}
        sizes = state.cohort_sizes()
        # Nearest first among equals: a shorter wait for those who move.
        emptiest = min(range(1, len(sizes)), key=lambda cohort: (sizes[cohort], cohort))
        surplus = sizes[0] - sizes[emptiest]
        if surplus < self._delay_threshold or sizes[0] < max(sizes):
            return {}
        return {d.request_id: emptiest for d in newest_first(state.ready, surplus // 2)}
