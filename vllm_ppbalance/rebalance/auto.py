"""Auto: holds decodes only where the cost model says that the pipeline goes round sooner for it."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from vllm_ppbalance.config import Settings
from vllm_ppbalance.cost_model import CostModel
from vllm_ppbalance.rebalance.choose import slack_s
from vllm_ppbalance.rebalance.fairness import Fairness
from vllm_ppbalance.rebalance.loads import cohort_loads, prompts_in_round, ready_context
from vllm_ppbalance.state import Decode, PipelineState

NOBODY: Mapping[str, int] = MappingProxyType({})


class _Plan(NamedTuple):
    """What a micro-batch may hold for one round."""

    most_tokens: int  # decodes and prompt tokens
    level_s: float  # its predicted time
    context: float  # tokens a decode reads, on average
    parks: float  # share of the decodes that sit out all the time; 0 where all fit


class Auto:
    """Keeps every micro-batch at the predicted time of an even one, where that pays.

    What governs a full pipeline is the slowest micro-batch, not the sum. Stage s works on
    micro-batch i once stage s-1 is done with it and stage s with micro-batch i-1, and a cohort
    comes back to the first stage once it has left the last. With P cohorts on P equal stages every
    closed path through these waits of one round costs P stage times, and the longest goes P times
    through the slowest cohort: a round takes P * max(t_i), at least the stages' own work,
    sum(t_i). So a hold pays by what it takes off the maximum, for all decodes, in every round until
    the cohorts change; it costs the held decode one stage time a step, once. Passing decodes on to
    the cohort behind is a step; the cohort ahead is pp_size - 1 steps away.

    Once a round: the time of an even micro-batch, N / P decodes of mean context, is the level. With
    GPU tiles a level just over a multiple of the tile is compared with staying at the multiple
    while the excess rotates: N / (P c) * t(c) for c tokens a micro-batch, whichever is less. A
    micro-batch is cut to the level where it exceeds it by more than `margin`; its prompt tokens
    count, so one with a chunk keeps fewer decodes. Where decodes cost nothing more, no micro-batch
    exceeds the level and nobody is held.

    Without a cost model to trust nobody is held.
    """

    def __init__(self, settings: Settings, cost_model: CostModel | None = None) -> None:
        self._slo_tpot = settings.slo_tpot
        self._margin = settings.rebalance.margin
        self._model = cost_model
        self._fairness = Fairness()
        self._plan: _Plan | None = None
        self._plan_until = 0

    def hold(self, state: PipelineState) -> Mapping[str, int]:
        """The decodes to hold, each until the micro-batch that has room for it."""
        model = self._model
        if model is None:
            return NOBODY
        if state.step >= self._plan_until:
            self._renew(model, state)
        plan = self._plan
        if plan is None or state.num_ready < 2:
            return NOBODY
        seconds = _seconds(model, state, state.num_ready, ready_context(state, plan.context))
        if seconds <= plan.level_s * (1.0 + self._margin):
            return NOBODY
        self._renew(model, state)
        return self._move(model, state, self._plan or plan)

    def _renew(self, model: CostModel, state: PipelineState) -> None:
        self._plan_until = state.step + state.pp_size
        self._plan = self._make_plan(model, state) if model.trusted else None

    def _make_plan(self, model: CostModel, state: PipelineState) -> _Plan | None:
        loads = cohort_loads(state)
        alive = sum(decodes for decodes, _ in loads)
        if alive < 2:
            return None
        context = sum(read for _, read in loads) / alive
        even = -(-alive // state.pp_size)
        level_s = model.predict(even, (), even, int(context * alive / state.pp_size))
        tile = model.tile()
        mean = (alive + prompts_in_round(state)) / state.pp_size
        if not tile or mean <= tile:
            return _Plan(even, level_s, context, 0.0)
        return self._at_tile(model, _Plan(even, level_s, context, 0.0), mean, tile)

    def _at_tile(self, model: CostModel, even: _Plan, mean: float, tile: int) -> _Plan:
        """At the multiple of the tile below the mean, or above it: whatever serves all sooner."""
        low = int(mean // tile) * tile
        high = low + tile
        low_s = model.predict(low, (), low, int(low * even.context))
        mean_s = model.predict(int(mean) + 1, (), int(mean) + 1, int(mean * even.context))
        if low_s * mean < low * mean_s * (1.0 - self._margin):
            return _Plan(low, low_s, even.context, 1.0 - low / mean)
        return even._replace(most_tokens=high)

    def _move(self, model: CostModel, state: PipelineState, plan: _Plan) -> Mapping[str, int]:
        ready = state.ready
        decodes, read = len(ready), sum(decode.context_tokens for decode in ready)
        before_s = seconds = _seconds(model, state, decodes, read)
        rooms = self._rooms(state, plan)
        places = [step for step, room in enumerate(rooms, 1) for _ in range(room)]
        held: dict[str, int] = {}
        for decode in self._ranked(state, ready, plan):
            if seconds <= plan.level_s or len(held) >= decodes - 1:
                break
            if len(held) >= len(places) and not plan.parks:
                break
            held[decode.request_id] = places[len(held)] if len(held) < len(places) else 1
            read -= decode.context_tokens
            seconds = _seconds(model, state, decodes - len(held), read)
        if not held or seconds > before_s * (1.0 - self._margin):
            return NOBODY
        self._fairness.note(held, state.step, state.pp_size, plan.parks)
        return held

    def _rooms(self, state: PipelineState, plan: _Plan) -> list[int]:
        """Decodes each of the next pp_size - 1 cohorts can take, what passes through it aside."""
        rooms, passing = [], 0
        for size in state.cohort_sizes()[1:]:
            room = plan.most_tokens - size - passing
            passing = max(-room, 0)
            rooms.append(max(room, 0))
        return rooms

    def _ranked(self, state: PipelineState, ready: Sequence[Decode], plan: _Plan) -> list[Decode]:
        """Who may be held, most slack first; the longest contexts where it is not the number."""
        free = [d for d in ready if self._fairness.free(d, state.step, state.pp_size)]
        if len(ready) + state.planned_prefill <= plan.most_tokens:
            return sorted(free, key=lambda d: -d.context_tokens)
        now_s, slo = state.now_s, self._slo_tpot
        return sorted(free, key=lambda d: (d.holds_in_a_row, -slack_s(d, now_s, slo)))


def _seconds(model: CostModel, state: PipelineState, decodes: int, context: int) -> float:
    """Stage time of this step's micro-batch with `decodes` of its decodes."""
    prompt = state.planned_prefill
    if not prompt:
        return model.predict(decodes, (), decodes, context)
    # A prompt that fills the budget takes whatever room the held ones leave.
    prompt = min(prompt + state.num_ready - decodes, state.prefill_backlog())
    return model.predict(decodes + prompt, ((prompt, 0),), decodes, context)
