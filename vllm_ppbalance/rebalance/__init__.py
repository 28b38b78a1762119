"""Rebalance policies, one a file: which ready decodes sit out the next micro-batch."""

from vllm_ppbalance.config import Settings
from vllm_ppbalance.rebalance.even_share import EvenShare
from vllm_ppbalance.rebalance.off import Off
from vllm_ppbalance.rebalance.threshold import Threshold
from vllm_ppbalance.state import RebalancePolicy


def make_rebalance_policy(settings: Settings) -> RebalancePolicy:
    """The policy that `rebalance.strategy` names."""
    match settings.rebalance.strategy:
        case "off":
            return Off()
        case "even_share":
            return EvenShare()
        case "threshold":
            return Threshold(settings.rebalance.delay_threshold)
