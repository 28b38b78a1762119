"""Decides each micro-batch: asks the policies, keeps their answers within what is safe."""

import time
from collections.abc import Mapping

from vllm_ppbalance.chunk import make_chunk_policy
from vllm_ppbalance.cohorts import Cohorts
from vllm_ppbalance.config import Settings
from vllm_ppbalance.rebalance import make_rebalance_policy
from vllm_ppbalance.rebalance.off import Off
from vllm_ppbalance.state import Clock, Decision, PipelineState, RebalancePolicy
from vllm_ppbalance.step_timer import StepTimer


class SystemClock:
    """The machine's clocks."""

    monotonic = staticmethod(time.monotonic)
    time = staticmethod(time.time)


class Controller:
    """The vLLM-free half of the scheduler: policies, cohorts, and latencies of one engine.

    `cadence` says when a decode may run again: "step" (pp_size steps later), "completion" (when
    its micro-batch is done), or "none" (any step: there are no cohorts to balance).
    """

    def __init__(self, settings: Settings, pp_size: int, cadence: str) -> None:
        self.settings = settings
        self.pp_size = pp_size
        self.clock: Clock = SystemClock()
        self.cohorts = Cohorts(pp_size, by_step=cadence == "step")
        self.timer = StepTimer()
        self.chunk = make_chunk_policy(settings)
        self.rebalance: RebalancePolicy = (
            Off() if cadence == "none" else make_rebalance_policy(settings)
        )
        self.num_moves = 0  # decodes held so far, each counted once per hold
        self._calm_from_step = 0  # no admission before this step: see `_admits`

    def decide(self, state: PipelineState) -> Decision:
        """The budget and the holds for this micro-batch; the holds are noted as done."""
        hold = self._safe_hold(self.rebalance.hold(state), state)
        budget = self._safe_budget(self.chunk.budget(state), state)
        if hold:
            self.cohorts.hold(hold, state.step)
            self.num_moves += len(hold)
        return Decision(budget, hold)

    def preempted(self, request_id: str, step: int) -> bool:
        """Note that a request lost its KV blocks in `step`; True if it was being held."""
        self._calm_from_step = step + 2 * self.pp_size
        return self.cohorts.forget(request_id)

    def _admits(self, state: PipelineState) -> bool:
        """Whether waiting requests may enter.

        Not within one round of a preemption: with balanced micro-batches every step both decodes
        and admits, so the victim would come back at once and push out the next.
        """
        balanced = not isinstance(self.rebalance, Off)
        calm = state.step >= self._calm_from_step
        return calm or not balanced or not state.num_ready or state.num_prefilling > 0

    def _safe_budget(self, budget: int | None, state: PipelineState) -> int:
        if not self._admits(state):
            return min(state.decode_budget, state.max_budget)
        if budget is None:
            return state.max_budget
        return min(max(budget, state.min_budget), state.max_budget)

    def _safe_hold(self, hold: Mapping[str, int], state: PipelineState) -> Mapping[str, int]:
        """At most pp_size - 1 steps in a row for anyone, and never all that could run."""
        if not hold:
            return hold
        longest = self.pp_size - 1
        past = self.cohorts.holds_in_a_row
        safe = {
            request_id: steps
            for request_id, steps in hold.items()
            if 1 <= steps <= longest - past.get(request_id, 0) and request_id in self.cohorts.ready
        }
        while safe and len(safe) >= len(state.ready):
            safe.popitem()
        return safe
