"""Rebalance policies, one a file: which ready decodes sit out the next micro-batch."""

from typing import assert_never

from vllm_ppbalance.config import Settings
from vllm_ppbalance.cost_model import CostModel
from vllm_ppbalance.rebalance.auto import Auto
from vllm_ppbalance.rebalance.even_share import EvenShare
from vllm_ppbalance.rebalance.off import Off
from vllm_ppbalance.rebalance.threshold import Threshold
from vllm_ppbalance.rebalance.tiered import Tiered
from vllm_ppbalance.state import RebalancePolicy


def make_rebalance_policy(
    settings: Settings, cost_model: CostModel | None = None
) -> RebalancePolicy:
    """The policy that `rebalance.strategy` names; `auto` holds nobody without a cost model."""
    match settings.rebalance.strategy:
        case "off":
            return Off()
        case "even_share":
            return EvenShare()
        case "threshold":
            return Threshold(settings.rebalance.delay_threshold)
        case "tiered":
            return Tiered(settings, cost_model)
        case "auto":
            return Auto(settings, cost_model)
        case unknown:
            assert_never(unknown)
