"""Auto: holds decodes only where the cost model says that the pipeline goes round sooner for it."""

from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from types import MappingProxyType

from vllm_ppbalance.config import Settings
from vllm_ppbalance.cost_model import CostModel
from vllm_ppbalance.rebalance.choose import slack_s
from vllm_ppbalance.rebalance.even_share import EvenShare
from vllm_ppbalance.rebalance.fairness import Fairness
from vllm_ppbalance.rebalance.loads import prompts_in_round, ready_context
from vllm_ppbalance.rebalance.plan import RoundPlan, find_places, make_plan, still_good
from vllm_ppbalance.state import Decode, PipelineState

NOBODY: Mapping[str, int] = MappingProxyType({})
STALE = 16  # a plan is made anew where the decodes have changed by more than this part
PAYS_BACK = 32.0  # rounds in which a hold must win what it costs
PROMPT_PAYS_BACK = 0.5  # where prompt tokens are the excess: the held must be moved back
SETTLING = 0.125  # weight of the newest round in the mean of prompt tokens
FEW_MORE = 8  # decodes read beyond half as many again as are to be held
FAR_OVER, FEW = 1.25, 2  # without a cost model: times the even share, and decodes beyond that


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
        self._even_share = EvenShare()
        self._fairness = Fairness()
        self._plan: RoundPlan | None = None
        self._plan_until = 0
        self._prompts = 0.0  # prompt tokens a micro-batch, over the last rounds

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
        if state.num_ready < 2 or _prompts_are_no_reason(state, plan):
            return NOBODY
        read = ready_context(state, plan.context)
        before_s = _seconds(model, state, state.num_ready, read)
        if before_s <= plan.level_s * (1.0 + self._margin):
            return NOBODY
        if state.step > plan.step and abs(state.decodes_alive - plan.alive) * STALE > plan.alive:
            self._renew(model, state)
            plan = self._plan or plan
        if plan.parks:
            return self._park(model, state, plan, read)
        if self._prompts_refill(model, state, read, before_s):
            return NOBODY
        places = find_places(state, plan)
        left = state.num_ready - len(places)
        least_s = _seconds(model, state, left, read * left // state.num_ready)
        if least_s > before_s * (1.0 - self._margin):
            return NOBODY
        return self._move(model, state, plan, read, places)

    def _by_count(self, state: PipelineState) -> Mapping[str, int]:
        far_over = FAR_OVER * state.decodes_alive / state.pp_size + FEW
        return self._even_share.hold(state) if state.num_ready > far_over else NOBODY

    def _renew(self, model: CostModel, state: PipelineState) -> None:
        self._plan_until = state.step + state.pp_size
        if self._plan is not None and still_good(self._plan, state):
            return
        if not model.trusted:
            self._plan = None
            return
        if model.tile():
            newest = prompts_in_round(state) / state.pp_size
            self._prompts += SETTLING * (newest - self._prompts)
        self._plan = make_plan(model, state, self._prompts, self._plan)

    def _park(
        self, model: CostModel, state: PipelineState, plan: RoundPlan, read: int
    ) -> Mapping[str, int]:
        """All over a multiple of the tile sit out, if there are enough who may: the best multiple.

        The lowest one is the plan's; a prompt may need more by itself.
        """
        tokens = state.num_ready + state.planned_prefill
        over = min(tokens - plan.most_tokens, state.num_ready - 1)
        if over < 1:
            return NOBODY
        before_s = _seconds(model, state, state.num_ready, read)
        free = self._candidates(state, over)
        lowest = max(plan.most_tokens, -(-(tokens - len(free)) // plan.tile) * plan.tile)
        best, best_s = 0, 0.0
        for most in range(lowest, tokens, plan.tile):
            count = tokens - most
            left = state.num_ready - count
            if left < 1:
                continue
            after_s = _seconds(model, state, left, read * left // state.num_ready)
            gain_s = (before_s - after_s) * state.pp_size * plan.alive
            gain_s -= count * plan.level_s
            if gain_s > best_s:
                best, best_s = count, gain_s
        if not best:
            return NOBODY
        places = find_places(state, plan)[:best]
        steps = places + [1] * (best - len(places))
        held = {d.request_id: k for d, k in zip(free, steps, strict=False)}
        self._fairness.note(held, state.step, state.pp_size, plan.parks)
        return held

    def _move(
        self,
        model: CostModel,
        state: PipelineState,
        plan: RoundPlan,
        read: int,
        places: list[int],
    ) -> Mapping[str, int]:
        """Hold while it pays: seconds lost by the held against those all decodes win."""
        decodes = state.num_ready
        seconds = _seconds(model, state, decodes, read)
        if decodes + state.planned_prefill <= plan.share:  # not too many, but too long ones
            candidates = sorted(self._free(state, state.ready), key=lambda d: -d.context_tokens)
        else:
            candidates = self._candidates(state, len(places))
        chosen: list[str] = []
        balance_s = best_s = 0.0
        best = 0
        for decode, steps in zip(candidates, places, strict=False):
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

    def _prompts_refill(
        self, model: CostModel, state: PipelineState, read: int, before_s: float
    ) -> bool:
        """Whether prompt tokens would take the room of all held, and that is no shorter.

        Less than `margin` could be won then even if all decodes were held.
        """
        prompt = state.planned_prefill
        if not prompt or prompt + state.num_ready > state.prefill_backlog():
            return False
        return model.decodes_s(state.num_ready, read) < before_s * self._margin

    def _free(self, state: PipelineState, walk: Iterable[Decode]) -> Iterator[Decode]:
        free, step, pp_size = self._fairness.free, state.step, state.pp_size
        return (decode for decode in walk if free(decode, step, pp_size))

    def _candidates(self, state: PipelineState, count: int) -> list[Decode]:
        """At least `count` who may be held, if there are, most slack first.

        While token gaps meet their target slack grows with every token, so the oldest are read, and
        the newest while they do not: no more than the best are likely to be among.
        """
        gap_s, now_s, slo = state.totals.mean_gap_s, state.now_s, self._slo_tpot
        missed = gap_s is not None and gap_s > slo
        free = self._free(state, reversed(state.ready) if missed else state.ready)
        few = islice(free, count + count // 2 + FEW_MORE)
        return sorted(few, key=lambda d: (d.holds_in_a_row, -slack_s(d, now_s, slo)))


def _prompts_are_no_reason(state: PipelineState, plan: RoundPlan) -> bool:
    """Whether only its prompt tokens make this micro-batch long, and to hold does not help.

    Either the next ones will have as many, or none of them has room for a decode. The tile is
    looked at elsewhere.
    """
    prompt = state.planned_prefill
    if not prompt or plan.parks or state.num_ready > plan.share:
        return False
    if state.prefill_backlog() >= state.pp_size * prompt:
        return True
    return not plan.tile and all(batch.next_decodes >= plan.share for batch in state.in_flight)


def _seconds(model: CostModel, state: PipelineState, decodes: int, context: int) -> float:
    """Stage time of this step's micro-batch with `decodes` of its decodes."""
    prompt = state.planned_prefill
    if not prompt:
        return model.predict(decodes, (), decodes, context)
    # A prompt that fills the budget takes whatever room the held ones leave.
    prompt = min(prompt + state.num_ready - decodes, state.prefill_backlog())
    return model.predict(decodes + prompt, ((prompt, 0),), decodes, context)
