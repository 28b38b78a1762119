"""Equal-latency chunks: a long prompt's next chunk shrinks as its prefix grows.

Sources: SGLang's dynamic chunking (rule, smoothing), AMD ATOM's dynamic chunked pipeline (model
with a prefix term, conditions of use).
"""

import logging
from dataclasses import dataclass
from math import inf, isfinite, sqrt

import numpy as np

from vllm_ppbalance.config import ChunkSettings, Settings
from vllm_ppbalance.cost_model import CostModel
from vllm_ppbalance.state import PipelineState, Waiting

SHARES = (0.25, 0.5, 0.75, 1.0)  # of the first chunk: chunk lengths the model is fitted on
PREFIXES = range(0, 17, 2)  # in first chunks: prefix lengths the model is fitted on
MIN_LENGTHS = 8  # published: distinct prefix lengths measured before the fit is used
MAX_RESIDUAL = 0.25  # published, mean error as a share of the time
MAX_CONDITION = 1e4  # of the scaled design; beyond, its coefficients are arbitrary
MIN_SHRINK = 0.05  # published: a chunk that shrinks by less is left alone
REFIT_STEPS = 256
LOG_EVERY_S = 60.0  # whether the rule is in use is said at most this often

logger = logging.getLogger("vllm.ppbalance")


@dataclass(frozen=True, slots=True)
class ChunkTimes:
    """t(L, x) = fixed + past * L + token * x + pair * (2 L x + x^2), seconds.

    L tokens come before the chunk of x.
    """

    fixed: float
    past: float
    token: float
    pair: float

    def equal_chunk(self, first: int, prefix: int) -> float:
        """Length of the chunk after `prefix` that takes as long as the first one; 0 for none."""
        slope = self.token + 2.0 * self.pair * prefix
        target_s = first * (self.token + self.pair * first) - self.past * prefix
        if target_s <= 0.0:
            return 0.0
        root = sqrt(slope * slope + 4.0 * self.pair * target_s)
        return 2.0 * target_s / (slope + root)

    def least_chunk(self, prefix: int, most_past: float) -> float:
        """Length from which reading the prefix takes under `most_past` of the chunk's time."""
        rest_s = self.past * prefix * (1.0 / most_past - 1.0) - self.fixed
        slope = self.token + 2.0 * self.pair * prefix
        if rest_s <= 0.0:
            return 0.0
        return 2.0 * rest_s / (slope + sqrt(slope * slope + 4.0 * self.pair * rest_s))


class EqualLatencyChunk:
    """Shrinks the chunk of a prompt that is alone; in company every chunk is the first one.

    Otherwise shrinking only adds chunks. Without a trusted cost model, too, every micro-batch gets
    `equal_first_chunk`. `reason` says what the last decision followed from; each change between
    use and fallback is logged.
    """

    def __init__(self, settings: Settings, cost_model: CostModel | None) -> None:
        self._knobs: ChunkSettings = settings.chunk
        self._model = cost_model
        self._times: ChunkTimes | None = None
        self._next_fit = 0
        self._fallback = ""  # why the rule is not in use; empty while it is
        self._said: bool | None = None  # whether the log last said that it is
        self._quiet_until_s = -inf
        self.reason = ""

    def budget(self, state: PipelineState) -> int | None:
        """Tokens of the next chunk, and of the decodes beside it."""
        first = min(self._knobs.equal_first_chunk or state.max_budget, state.max_budget)
        self._refit(state, first)
        if self._times is None:
            self.reason = self._fallback
            return first
        prompts = state.num_waiting + state.num_prefilling
        most = state.max_budget - state.decode_budget
        if prompts != 1 or most < 1 or not state.waiting:
            self.reason = "in company" if prompts > 1 else "no prompt"
            return first
        return state.decode_budget + self._chunk(self._times, first, most, state.waiting[0])

    def _chunk(self, times: ChunkTimes, first: int, most: int, prompt: Waiting) -> int:
        knobs = self._knobs
        equal = times.equal_chunk(first, prompt.prefix_tokens)
        smoothed = first + knobs.equal_smooth_factor * (min(equal, first) - first)
        least = max(
            knobs.equal_min_ratio * first,
            min(times.least_chunk(prompt.prefix_tokens, knobs.equal_prefix_ratio), first),
        )
        align = knobs.equal_alignment
        chunk = max(int(max(smoothed, least)) // align * align, min(align, first))
        self.reason = "equal latency"
        tail = prompt.new_tokens - chunk
        if 0 < tail < knobs.equal_tail_ratio * chunk:
            # One round less, or two alike where the budget does not hold both.
            chunk, self.reason = prompt.new_tokens, "short rest"
            if chunk > most:
                chunk = -(-chunk // (2 * align)) * align
        return max(min(chunk, most), 1)

    def _refit(self, state: PipelineState, first: int) -> None:
        lost = self._times is not None and self._model is not None and not self._model.trusted
        if state.step < self._next_fit and not lost:
            return
        self._next_fit = state.step + REFIT_STEPS
        found = self._find(first)
        if isinstance(found, str):
            self._times, self._fallback = None, f"fallback: {found}"
        else:
            self._times, self._fallback = found, ""
        self._say(first, state.now_s)

    def _find(self, first: int) -> ChunkTimes | str:
        """Chunk times to go by, or why there are none."""
        model = self._model
        if model is None:
            return "there is no cost model"
        if model.health is not None:
            return model.health
        if model.num_prefix_lengths < MIN_LENGTHS:
            return f"{model.num_prefix_lengths} of {MIN_LENGTHS} prefix lengths seen"
        return fit_chunk_times(model, first)

    def _say(self, first: int, now_s: float) -> None:
        in_use = self._times is not None
        if in_use == self._said or now_s < self._quiet_until_s:
            return
        self._said, self._quiet_until_s = in_use, now_s + LOG_EVERY_S
        if in_use:
            logger.info("ppbalance: equal-latency chunks are in use, from %d tokens on.", first)
        else:
            why = self._fallback.removeprefix("fallback: ")
            logger.info("ppbalance: every chunk has %d tokens, none shrinks: %s.", first, why)


def fit_chunk_times(model: CostModel, first: int) -> ChunkTimes | str:
    """The model's predictions for one prompt in chunks of about `first`, or why they do not fit."""
    points = [
        (prefix * first, max(int(share * first), 1)) for prefix in PREFIXES for share in SHARES
    ]
    times = np.array([model.predict(x, ((x, prefix),), 0, 0) for prefix, x in points])
    rows = [(1.0, prefix, x, x * (2.0 * prefix + x)) for prefix, x in points]
    design = np.array(rows) / times[:, None]
    scale = np.abs(design).max(axis=0)
    condition = float(np.linalg.cond(design / scale))
    if not condition <= MAX_CONDITION:
        return f"chunk times are too alike to tell apart (condition {condition:.0f})"
    solved = np.linalg.lstsq(design / scale, np.ones(len(times)), rcond=None)[0] / scale
    residual = float(np.abs(design @ solved - 1.0).mean())
    fixed, past, token, pair = (float(value) for value in solved)
    if not isfinite(residual) or residual > MAX_RESIDUAL:
        return f"chunk times do not follow the model (error {residual:.0%})"
    if pair <= 0.0 or token < 0.0:
        return "chunks do not get slower as the prefix grows"
    found = ChunkTimes(max(fixed, 0.0), max(past, 0.0), token, pair)
    if found.equal_chunk(first, PREFIXES[-1] * first) > (1.0 - MIN_SHRINK) * first:
        return f"chunks would shrink by less than {MIN_SHRINK:.0%}"
    return found
