"""Auto: holds decodes only where the cost model says that the pipeline goes round sooner for it."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from vllm_ppbalance.config import Settings
from vllm_ppbalance.cost_model import CostModel
from vllm_ppbalance.rebalance.choose import slack_s
from vllm_ppbalance.rebalance.even_share import EvenShare
from vllm_ppbalance.rebalance.fairness import Fairness
from vllm_ppbalance.rebalance.loads import cohort_loads, prompts_in_round, ready_context
from vllm_ppbalance.state import Decode, PipelineState

NOBODY: Mapping[str, int] = MappingProxyType({})
STALE = 16  # a plan is made anew where the decodes have changed by more than this part
PAYS_BACK = 32.0  # rounds in which a hold must win what it costs
PROMPT_PAYS_BACK = 0.5  # where prompt tokens are the excess: the held must be moved back
FAR_OVER, FEW = 1.25, 2  # without a cost model: times the even share, and decodes beyond that


class _Plan(NamedTuple):
    """What a micro-batch may hold for one round."""

    most_tokens: int  # decodes and prompt tokens
    level_s: float  # its predicted time
    context: float  # tokens a decode reads, on average
    parks: float  # share of the decodes that sit out all the time; 0 where all fit
    alive: int  # decodes of all cohorts
    share: int  # decodes of an even micro-batch
    tile: int  # tokens; 0 for none
    by_context: float  # share of a decode's own time that reading its context takes


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

    Without a cost model to trust, decodes are spread evenly, but only out of a micro-batch that is
    far over its share: in simulation that wins most of what even shares win where decodes cost
    time, and loses less than 0.1 % where they do not, which plain even shares do not keep to.
    """

    def __init__(self, settings: Settings, cost_model: CostModel | None = None) -> None:
        self._slo_tpot = settings.slo_tpot
        self._margin = settings.rebalance.margin
        self._model = cost_model
        self._fairness = Fairness()
        self._even_share = EvenShare()
        self._plan: _Plan | None = None
        self._plan_until = 0

    def hold(self, state: PipelineState) -> Mapping[str, int]:
        """The decodes to hold, each until the micro-batch that has room for it."""
        model = self._model
        if model is None:
            return self._by_count(state)
        if state.step >= self._plan_until:
            self._renew(model, state)
        plan = self._plan
        if plan is None:
            return NOBODY if model.trusted else self._by_count(state)
        if state.num_ready < 2:
            return NOBODY
        read = ready_context(state, plan.context)
        before_s = _seconds(model, state, state.num_ready, read)
        if before_s <= plan.level_s * (1.0 + self._margin):
            return NOBODY
        alive = state.decodes_alive
        if abs(alive - plan.alive) * STALE > plan.alive:
            self._renew(model, state)
            plan = self._plan or plan
        places = self._places(state, plan)
        left = state.num_ready - len(places)
        least_s = _seconds(model, state, left, read * left // state.num_ready)
        if least_s > before_s * (1.0 - self._margin):
            return NOBODY
        return self._move(model, state, plan, places)

    def _by_count(self, state: PipelineState) -> Mapping[str, int]:
        far_over = FAR_OVER * state.decodes_alive / state.pp_size + FEW
        return self._even_share.hold(state) if state.num_ready > far_over else NOBODY

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
        by_context = self._by_context(model, even, int(context * even))
        tile = model.tile()
        plan = _Plan(max(even, tile), level_s, context, 0.0, alive, even, tile, by_context)
        mean = (alive + prompts_in_round(state)) / state.pp_size
        return self._at_tile(model, plan, mean, tile) if 0 < tile < mean else plan

    def _by_context(self, model: CostModel, decodes: int, read: int) -> float:
        few, more = decodes // 2, decodes + decodes // 2
        own_s = model.predict(more, (), more, read) - model.predict(max(few, 1), (), few, read)
        context_s = model.predict(decodes, (), decodes, 2 * read)
        context_s -= model.predict(decodes, (), decodes, read)
        return context_s / (own_s + context_s) if context_s > 0.0 else 0.0

    def _at_tile(self, model: CostModel, even: _Plan, mean: float, tile: int) -> _Plan:
        """At the multiple of the tile below the mean, or above it: whatever serves all sooner."""
        low = int(mean // tile) * tile
        high = low + tile
        low_s = model.predict(low, (), low, int(low * even.context))
        mean_s = model.predict(int(mean) + 1, (), int(mean) + 1, int(mean * even.context))
        if low_s * mean < low * mean_s * (1.0 - self._margin):
            return even._replace(most_tokens=low, level_s=low_s, parks=1.0 - low / mean)
        return even._replace(most_tokens=high)

    def _places(self, state: PipelineState, plan: _Plan) -> list[int]:
        """For each decode that another micro-batch can take, in how many steps, nearest first.

        What passes through a cohort from the one before takes its room there. Where there are
        tiles, those that fit a tile without a further one come after those that make it even.
        """
        loads = [_weigh(*load, plan) for load in cohort_loads(state)]
        one = loads[0] / state.num_ready
        most = state.num_ready - 1
        places = _spread(loads[1:], plan.share, one, most)
        if not plan.tile:
            return places
        for steps in set(places):
            loads[steps] += places.count(steps) * one
        places += _spread(loads[1:], plan.most_tokens, one, most - len(places))
        if plan.parks:
            over = state.num_ready + state.planned_prefill - plan.most_tokens
            places += [1] * min(over - len(places), most - len(places))
        return places

    def _move(
        self, model: CostModel, state: PipelineState, plan: _Plan, places: list[int]
    ) -> Mapping[str, int]:
        """Hold while it pays: seconds lost by the held against those all decodes win."""
        ready = state.ready
        decodes, read = len(ready), sum(decode.context_tokens for decode in ready)
        seconds = _seconds(model, state, decodes, read)
        chosen: list[str] = []
        balance_s = best_s = 0.0
        best = 0
        for decode, steps in zip(self._ranked(state, ready, plan), places, strict=False):
            if seconds <= plan.level_s or decodes < 2:
                break
            # An excess of decodes stays until it is moved, one of prompt tokens for a round.
            rounds = PAYS_BACK if decodes > plan.share else PROMPT_PAYS_BACK
            decodes -= 1
            read -= decode.context_tokens
            after_s = _seconds(model, state, decodes, read)
            balance_s += (seconds - after_s) * state.pp_size * plan.alive * rounds
            balance_s -= steps * plan.level_s
            seconds = after_s
            chosen.append(decode.request_id)
            if balance_s > best_s:
                best, best_s = len(chosen), balance_s
        held = dict(zip(chosen[:best], places, strict=False))
        if held:
            self._fairness.note(held, state.step, state.pp_size, plan.parks)
        return held

    def _ranked(self, state: PipelineState, ready: Sequence[Decode], plan: _Plan) -> list[Decode]:
        """Who may be held, most slack first; the longest contexts where it is not the number."""
        free = [d for d in ready if self._fairness.free(d, state.step, state.pp_size)]
        if len(ready) + state.planned_prefill <= plan.share:
            return sorted(free, key=lambda d: -d.context_tokens)
        now_s, slo = state.now_s, self._slo_tpot
        return sorted(free, key=lambda d: (d.holds_in_a_row, -slack_s(d, now_s, slo)))


def _weigh(decodes: int, read: int, plan: _Plan) -> float:
    """A cohort's load in decodes of mean context."""
    return decodes + plan.by_context * (read / max(plan.context, 1.0) - decodes)


def _spread(filled: Sequence[float], level: float, one: float, most: int) -> list[int]:
    """At most `most` places in batches `filled` to some part of `level`, each place worth `one`."""
    places: list[int] = []
    passing = 0.0
    for steps, used in enumerate(filled, 1):
        room = level - used - passing
        passing = max(-room, 0.0)
        places += [steps] * min(int(room / one + 0.01), most - len(places))
    return places


def _seconds(model: CostModel, state: PipelineState, decodes: int, context: int) -> float:
    """Stage time of this step's micro-batch with `decodes` of its decodes."""
    prompt = state.planned_prefill
    if not prompt:
        return model.predict(decodes, (), decodes, context)
    # A prompt that fills the budget takes whatever room the held ones leave.
    prompt = min(prompt + state.num_ready - decodes, state.prefill_backlog())
    return model.predict(decodes + prompt, ((prompt, 0),), decodes, context)
