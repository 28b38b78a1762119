"""Which token budgets are worth giving: how fast each computes prompts beside the decodes."""

from collections.abc import Sequence
from itertools import islice
from typing import NamedTuple

from vllm_ppbalance.config import Settings
from vllm_ppbalance.cost_model import CostModel
from vllm_ppbalance.state import PipelineState, Waiting

# Budgets looked at, tokens: fine where the GPU's tiles show.
SIZES = (
    *range(64, 1024, 64),
    *range(1024, 2048, 128),
    *range(2048, 4096, 256),
    *range(4096, 8192, 512),
    *range(8192, 32769, 2048),
)
FASTER = 1.02  # a larger budget is worth giving from this on
SLOWER = 1.005  # a budget that takes no longer than this times a smaller one replaces it
# Rates are computed again from a change of a load by this share, and by this much at least.
STALE = 0.1
FRESH_ROUNDS = 16  # the cost model learns: rates are computed again after so many at the latest
LEAST_CHANGE = (4, 8192, 1024, 2048)  # decodes, tokens they read, mean prefix, head's prefix
HEAD = 16  # prompts at the head of the queue that are looked at
LONG_PREFIX = 4096  # tokens; from here on a chunk's own prefix is looked at as well
ROOM = 1.25  # times the decodes' own time that a micro-batch may take in any case
LONGEST = 2.0  # most times the bound that a chunk at its own prefix may take


class Rate(NamedTuple):
    """A token budget, decodes included, and what it does."""

    tokens: int
    seconds: float  # of the slowest stage
    prefill: float  # prompt tokens a second, with the pipeline full


class PrefillRates:
    """The budgets that compute prompts faster than every smaller one, within the TPOT target.

    So a budget just over one of the GPU's tiles is not among them. Stage times are those at the
    mean prefix of the prompts at hand: TPOT is an average over many micro-batches, and so is its
    bound, `balanced_tpot_ratio * slo_tpot` a round.
    """

    def __init__(self, settings: Settings, model: CostModel) -> None:
        self._settings = settings
        self.model = model
        self._rates: list[Rate] = []
        self._load = (0.0, 0.0, 0.0, 0.0)
        self._step = self._fresh_until = -1
        self.head: list[Waiting] = []  # the first HEAD prompts, as last read

    def at(self, state: PipelineState) -> Sequence[Rate]:
        """Ascending and never empty; beside this step's share of the decodes."""
        if state.step != self._step:
            self._step = state.step
            self.head = list(islice(state.waiting, HEAD)) if state.waits else []
            head, mean = prefixes(self.head)
            decodes = state.decode_share
            context = int(decodes * state.mean_context)
            load = (float(decodes), float(context), mean, float(head))
            changed = any(map(_changed, load, self._load, LEAST_CHANGE))
            if changed or state.step >= self._fresh_until:
                self._load = load
                self._fresh_until = state.step + FRESH_ROUNDS * state.pp_size
                self._rates = self._compute(state, decodes, context, int(mean), head)
        return self._rates

    def _compute(
        self, state: PipelineState, decodes: int, context: int, prefix: int, head: int
    ) -> list[Rate]:
        predict, pp_size = self.model.predict, state.pp_size
        decode_tokens = decodes * state.tokens_per_decode
        bound_s = self._settings.chunk.balanced_tpot_ratio * self._settings.slo_tpot / pp_size
        if decodes:
            # Where decodes alone hardly keep the target, small budgets would only lose TTFT too.
            alone_s = predict(decode_tokens, (), decodes, context)
            bound_s = max(bound_s, ROOM * alone_s)
        else:
            bound_s = float("inf")  # nobody's token waits
        rates: list[Rate] = []
        fastest = 0.0
        for tokens in (*(size for size in SIZES if size < state.max_budget), state.max_budget):
            new = tokens - decode_tokens
            if new <= 0:
                continue
            seconds = predict(tokens, ((new, prefix),), decodes, context)
            if rates and seconds > bound_s:
                break
            if rates and head > LONG_PREFIX:
                own_s = predict(tokens, ((new, head),), decodes, context)
                if own_s > LONGEST * bound_s:
                    break
            if new / seconds > fastest * FASTER:
                fastest = new / seconds
                if rates and seconds < rates[-1].seconds * SLOWER:
                    rates.pop()  # it would leave part of a tile empty
                rates.append(Rate(tokens, seconds, fastest))
        return rates or [Rate(state.max_budget, bound_s, 1.0)]


def prefixes(prompts: Sequence[Waiting]) -> tuple[int, float]:
    """Tokens before the next chunk, and before an average token of `prompts`."""
    tokens = pairs = 0
    for _, new, before, _, _ in prompts:
        length = new + before
        tokens += length
        pairs += length * length
    return (prompts[0].prefix_tokens, pairs / (2.0 * tokens)) if tokens else (0, 0.0)


def _changed(now: float, before: float, least: float) -> bool:
    change = abs(now - before)
    return change > least and change > STALE * before
