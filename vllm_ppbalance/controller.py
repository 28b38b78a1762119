"""Decides each micro-batch: asks the policies, keeps their answers within what is safe."""

import logging
import time
from collections.abc import Collection, Mapping
from math import inf

from vllm_ppbalance.admission import NO_CHANGE, OnTimeFirst, pace_of
from vllm_ppbalance.backlog import Backlog
from vllm_ppbalance.chunk import make_chunk_policy
from vllm_ppbalance.cohorts import Cohorts
from vllm_ppbalance.config import Settings
from vllm_ppbalance.cost_model import CostModel
from vllm_ppbalance.prefill_rates import PrefillRates
from vllm_ppbalance.profile_store import ProfileStore, Saver
from vllm_ppbalance.rebalance import make_rebalance_policy
from vllm_ppbalance.rebalance.off import Off
from vllm_ppbalance.state import (
    Clock,
    Decision,
    MicroBatch,
    Order,
    PipelineState,
    RebalancePolicy,
)
from vllm_ppbalance.step_timer import StepTimer

logger = logging.getLogger("vllm.ppbalance")

WELL_FED = 2000  # samples
SAY_EVERY_S = 10.0  # whether predictions are followed is said at most this often
STEADY_ROUNDS = 16
FEW = 2  # ready decodes
CALM_ROUNDS = 4  # without admission after a preemption, while decodes run


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
        self.timer = StepTimer(pp_size, tokens_on_device=cadence == "step")
        self.backlog = Backlog()
        self.prefilling: set[str] = set()  # admitted requests with prompt left to compute
        self.kv_free = 1.0  # share of the KV cache, as last read
        self.budget_floor = 1  # tokens beyond the decodes' that keep every prompt going
        self.chunk = make_chunk_policy(settings)
        self.rebalance: RebalancePolicy = (
            Off() if cadence == "none" else make_rebalance_policy(settings)
        )
        self.adapters_fit = True  # False while a micro-batch could need too many LoRA adapters
        self.admission: OnTimeFirst | None = None  # None: first come, first served
        self.rates: PrefillRates | None = None
        self.cost_model: CostModel | None = None
        self.saver: Saver | None = None
        self._health: str | None = None  # of the model, as the log last said it
        self._quiet_until_s = -inf
        self.profile = "not needed"  # where the first stage times come from, for the log
        self.num_moves = 0  # decodes held so far, each counted once per hold
        self._plans_prefill = settings.rebalance.strategy == "auto"
        self._last_hold = 0
        self._calm_until = 0  # the step from which waiting requests may enter again

    def use_model(self, model: CostModel, store: ProfileStore) -> None:
        """Predict with `model` from now on, and keep what it learns in `store`."""
        self.cost_model = model
        if model.health != self._health:
            self._say_health(model)
        self.saver = Saver(store, model)
        self.rates = PrefillRates(self.settings, model)
        self.chunk = make_chunk_policy(self.settings, model, self.rates)
        if not isinstance(self.rebalance, Off):
            self.rebalance = make_rebalance_policy(self.settings, model)

    @property
    def predicts(self) -> bool:
        """Whether there is a cost model, and one to trust."""
        return self.cost_model is not None and self._health is None

    def predict(self, batch: MicroBatch) -> float | None:
        """Seconds the cost model expects of a micro-batch; None without a model."""
        model = self.cost_model
        if model is None:
            return None
        return model.predict(
            batch.num_tokens, batch.prefills, batch.num_decodes, batch.decode_context
        )

    def learn(self, batch: MicroBatch, seconds: float, now_s: float) -> None:
        """Take a measured stage time of a micro-batch into the cost model."""
        model = self.cost_model
        # A well-fed model learns from one micro-batch a round: the rest tells it little.
        if model is None or (model.num_samples > WELL_FED and batch.step % self.pp_size):
            return
        decodes, context = batch.num_decodes, batch.decode_context
        model.observe(batch.num_tokens, batch.prefills, decodes, context, seconds, now_s=now_s)
        changed = (model.health is None) != (self._health is None)
        if changed and now_s >= self._quiet_until_s:
            self._quiet_until_s = now_s + SAY_EVERY_S
            self._say_health(model)
        if self.saver is not None:
            self.saver.tick(now_s)

    def _say_health(self, model: CostModel) -> None:
        """Say once when the predictions stop or start to be followed."""
        self._health = model.health
        if self._health is None:
            logger.info("ppbalance: stage times are known well enough to predict from.")
            return
        # A guess that has seen nothing yet is as it should be.
        level = logging.WARNING if model.profiled or model.num_samples else logging.INFO
        text = "ppbalance: fixed budget, predictions are not followed: %s."
        logger.log(level, text, self._health)

    @property
    def may_be_empty(self) -> bool:
        """Whether the step about to be formed may have nothing to run but decodes that are held.

        A ready one may have its last token in flight.
        """
        cohorts = self.cohorts
        return bool(
            cohorts.parked
            and len(cohorts.ready) <= FEW
            and not self.prefilling
            and not self.backlog.waiting_tokens
        )

    def steady(self, step: int) -> bool:
        """Whether `step` needs no decision: nothing waits, and its decodes are last round's.

        True only after a whole round without holds, and never for a round in every STEADY_ROUNDS:
        contexts grow.
        """
        cohorts, pp_size = self.cohorts, self.pp_size
        if self.backlog.waiting_tokens or self.prefilling or cohorts.parked:
            return False
        if step - self._last_hold < 2 * pp_size or step // pp_size % STEADY_ROUNDS == 0:
            return False
        before = cohorts.recent[0] if cohorts.recent else None
        return (
            before is not None
            and before.step == step - pp_size
            and before.num_decodes == before.num_requests == len(cohorts.ready)
        )

    def decide(self, state: PipelineState) -> Decision:
        """The budget and the holds for this micro-batch; the holds are noted as done."""
        budget = self._budget(state)
        backlog = state.prefill_backlog() if self._plans_prefill else 0
        if backlog:
            state = state.planning(max(min(backlog, budget - state.decode_budget), 0))
        hold = self.rebalance.hold(state) if self.adapters_fit else {}
        if hold:
            hold = self._safe_hold(hold, state)
            self.cohorts.hold(hold, state.step)
            self.num_moves += len(hold)
            self._last_hold = state.step
        # Once a round, and never while KV is short.
        order = NO_CHANGE
        if not state.step % self.pp_size and state.num_waiting and state.step >= self._calm_until:
            order = self._order(state, budget)
        return Decision(budget, hold, getattr(self.chunk, "reason", ""), order)

    def _order(self, state: PipelineState, budget: int) -> Order:
        """Who of the waiting goes first or last."""
        admission, rates = self.admission, self.rates
        if admission is None or rates is None or not self.predicts:
            return NO_CHANGE
        left, now_s = state.prefill_backlog(), self.clock.time()
        computed = state.arrived_tokens - left
        if admission.at_ease(left, now_s, computed):
            return NO_CHANGE
        # `balanced` goes as fast as what is due needs, the others at the budget they give.
        limit = None if self.settings.chunk.strategy == "balanced" else budget
        pace = pace_of(state, rates, limit, self.backlog.cached_share)
        return admission.order(pace, now_s, computed)

    def arrived(self, request_id: str, num_tokens: int, arrival_s: float) -> None:
        """A request came in; `arrival_s` is on the wall clock."""
        self.backlog.arrived(request_id, num_tokens)
        if self.admission is not None:
            self.admission.arrived(request_id, num_tokens, arrival_s)

    def left_queue(self, request_ids: Collection[str]) -> None:
        """Requests were admitted, finished or aborted; those not waiting are ignored."""
        self.backlog.left(request_ids)
        if self.admission is not None:
            self.admission.left(request_ids)

    def _budget(self, state: PipelineState) -> int:
        budget = self.chunk.budget(state)
        if state.step < self._calm_until and self._keeps_calm(state):
            return min(state.decode_budget, state.max_budget)
        if budget is None:
            return state.max_budget
        return min(max(budget, state.min_budget), state.max_budget)

    def finished(self, request_ids: Collection[str]) -> None:
        """Forget requests that finished or were aborted."""
        self.prefilling.difference_update(request_ids)
        self.left_queue(request_ids)
        self.timer.forget(request_ids)

    def preempted(self, request_id: str, num_tokens: int, step: int) -> bool:
        """Note that a request lost its KV blocks in `step`; True if it was being held.

        It has `num_tokens` to compute again.
        """
        self.prefilling.discard(request_id)
        self.backlog.returned(request_id, num_tokens)
        self._calm_until = step + CALM_ROUNDS * self.pp_size
        return self.cohorts.forget(request_id)

    def _keeps_calm(self, state: PipelineState) -> bool:
        """Whether the waiting requests stay out, soon after a preemption.

        With balanced micro-batches every step both decodes and admits: the victim would come back
        at once and push out the next. Running requests always go on.
        """
        balanced = not isinstance(self.rebalance, Off)
        return balanced and state.num_ready > 0 and not state.num_prefilling

    def _safe_hold(self, hold: Mapping[str, int], state: PipelineState) -> Mapping[str, int]:
        """At most pp_size - 1 steps in a row for anyone, and never all that could run."""
        longest = self.pp_size - 1
        past = self.cohorts.holds_in_a_row
        safe = {
            request_id: steps
            for request_id, steps in hold.items()
            if 1 <= steps <= longest - past.get(request_id, 0) and request_id in self.cohorts.ready
        }
        if safe and all(decode.request_id in safe for decode in state.ready):
            safe.popitem()
        return safe
