"""A round's plan: what a micro-batch may hold, and which of the next ones have room."""

from collections.abc import Sequence
from typing import NamedTuple

from vllm_ppbalance.cost_model import CostModel
from vllm_ppbalance.rebalance.loads import cohort_loads, mean_context
from vllm_ppbalance.state import PipelineState

# Predicted gains at which to begin and to end staying at a tile. Prompts that do not fit the tile
# take part of the gain, and changing back and forth makes the micro-batches unequal.
PARK_ON, PARK_OFF = 0.15, 0.08
ALIKE = 8  # loads are alike that differ by no more than this part
VERY_FEW = 128  # as a part of the decodes: a change that no stage time shows
KEPT_ROUNDS = 8


class RoundPlan(NamedTuple):
    """The even micro-batch of a round, and the GPU's tile where staying in it pays."""

    step: int  # at which it was made
    alive: int  # decodes of all cohorts
    share: int  # decodes of an even micro-batch
    level_s: float  # its predicted time
    context: float  # tokens a decode reads, on average
    by_context: float  # share of a decode's own time that reading its context takes
    weighed_at: tuple[int, float]  # decodes and context for which that was computed
    tile: int  # tokens; 0 for none
    most_tokens: int  # decodes and prompt tokens that need no further tile
    parks: float = 0.0  # share of the decodes that sit out all the time; 0 where all fit


def make_plan(
    model: CostModel,
    state: PipelineState,
    prompts: float = 0.0,
    before: RoundPlan | None = None,
) -> RoundPlan | None:
    """The plan of the next pp_size steps; None with fewer than two decodes.

    `prompts` are the prompt tokens of a micro-batch, on average over the last rounds. Where the
    load is about as `before`, so is the weight of contexts.
    """
    alive = state.decodes_alive
    if alive < 2:
        return None
    context = mean_context(state.recent)
    share = -(-alive // state.pp_size)
    level_s = model.predict(share, (), share, int(context * alive / state.pp_size))
    if before is not None and _alike(before.weighed_at, share, context):
        by_context, weighed_at = before.by_context, before.weighed_at
    else:
        by_context, weighed_at = _by_context(model, share, int(context * share)), (share, context)
    tile = model.tile()
    plan = RoundPlan(
        state.step, alive, share, level_s, context, by_context, weighed_at, tile, max(share, tile)
    )
    if not tile:
        return plan
    mean = alive / state.pp_size + prompts
    if mean <= tile:
        return plan
    return _at_tile(model, plan, mean, before is not None and before.parks > 0.0)


def still_good(plan: RoundPlan, state: PipelineState) -> bool:
    """Whether a plan may serve one more round: its decodes are those alive, but for very few.

    Never where there are tiles, which go by prompts too, and not for long: contexts grow.
    """
    if plan.tile or state.step >= plan.step + KEPT_ROUNDS * state.pp_size:
        return False
    return abs(state.decodes_alive - plan.alive) * VERY_FEW <= plan.alive


def _alike(weighed_at: tuple[int, float], share: int, context: float) -> bool:
    decodes, read = weighed_at
    return abs(decodes - share) * ALIKE <= share and abs(read - context) * ALIKE <= context


def _by_context(model: CostModel, decodes: int, read: int) -> float:
    few, more = max(decodes // 2, 1), decodes + decodes // 2
    own_s = model.predict(more, (), more, read) - model.predict(few, (), few, read)
    context_s = model.predict(decodes, (), decodes, 2 * read)
    context_s -= model.predict(decodes, (), decodes, read)
    return context_s / (own_s + context_s) if context_s > 0.0 else 0.0


def _at_tile(model: CostModel, plan: RoundPlan, mean: float, parking: bool) -> RoundPlan:
    """At the multiple of the tile below the mean tokens, or above: whatever serves all sooner."""
    low = int(mean // plan.tile) * plan.tile
    low_s = model.predict(low, (), low, int(low * plan.context))
    mean_s = model.predict(int(mean) + 1, (), int(mean) + 1, int(mean * plan.context))
    gain = 1.0 - low_s * mean / (low * mean_s)
    if gain > (PARK_OFF if parking else PARK_ON):
        return plan._replace(most_tokens=low, level_s=low_s, parks=1.0 - low / mean)
    return plan._replace(most_tokens=low + plan.tile)


def find_places(state: PipelineState, plan: RoundPlan) -> list[int]:
    """For each decode that another micro-batch can take, in how many steps, nearest first.

    Where there are tiles, those that fit a tile without a further one come after those that make
    it even.
    """
    own, per_token = 1.0 - plan.by_context, plan.by_context / max(plan.context, 1.0)
    loads = [own * decodes + per_token * read for decodes, read in cohort_loads(state)]
    one, most = loads[0] / state.num_ready, state.num_ready - 1
    if one <= 0.0:  # by a plan from before the last decodes all their time goes by context
        return []
    if plan.tile:  # more than these cross no further step
        over = state.num_ready + state.planned_prefill - plan.most_tokens
        most = min(most, max(over, state.num_ready - plan.share, 0))
    places = _spread(loads, plan.share, one, most)
    if not plan.tile:
        return places
    for steps in set(places):
        loads[steps] += places.count(steps) * one
    return places + _spread(loads, plan.most_tokens, one, most - len(places))


def _spread(loads: Sequence[float], level: float, one: float, most: int) -> list[int]:
    """At most `most` places in the cohorts after the first, each worth `one`, up to `level`.

    `loads` are in decodes of mean context. What passes through a cohort from the one before takes
    its room there.
    """
    places: list[int] = []
    passing = 0.0
    for steps in range(1, len(loads)):
        room = level - loads[steps] - passing
        if room < 0.0:
            passing = -room
            continue
        passing = 0.0
        count = int(room / one + 0.01)
        if count:
            places += [steps] * min(count, most - len(places))
    return places
