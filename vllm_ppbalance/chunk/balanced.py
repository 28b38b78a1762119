"""Balanced: equal micro-batches, as large as the demand asks and no larger."""

from bisect import bisect_left
from collections.abc import Sequence
from itertools import islice

from vllm_ppbalance.chunk.guards import why_fallback
from vllm_ppbalance.config import Settings
from vllm_ppbalance.cost_model import CostModel
from vllm_ppbalance.prefill_rates import SIZES, PrefillRates, Rate
from vllm_ppbalance.state import PipelineState, Waiting

LIVED = 0.02  # weight of the newest round in the mean stage time over a request's life
RECENT = 0.2  # the same over the last rounds
NEAR = 0.005  # s; least time to a deadline that a rate is computed from
PERIOD = 4  # steps; a decision holds for a round, and for this long at least
LITTLE_KV = 2.0  # times `kv_free_threshold`; with less the KV cache counts as seats do
RISE = 2  # times as many waiting tokens as a round began with: decide anew at once


class BalancedChunk:
    """Spreads the prompt tokens at hand over the next rounds, faster where a deadline asks for it.

    1. Demand: prompt tokens that can be admitted / (rounds * pp_size) a micro-batch, beside its
       share of decodes. Rounded up to a budget of `PrefillRates`: sizes that waste no tile.
    2. Cap: the smallest budget that reaches `balanced_throughput_ratio` of the best prefill rate.
    3. Deadlines: if the first k waiting prompts must be computed faster than that to meet
       `balanced_deadline_ratio * slo_ttft`, the smallest budget that is fast enough; the fastest
       one when none is.
    4. Seats: decodes alive grow with the time a round takes (Little's law). With
       `max_num_seqs` or the KV cache as the limit, a larger budget admits nobody sooner: the stage
       time may grow only as far as the seats that are free.
    5. A prompt alone: the chunk with the shortest way through the pipeline, fill and drain counted.

    Without a trusted cost model every micro-batch gets `fallback_tokens`. `reason` says which of
    these it was.
    """

    def __init__(
        self, settings: Settings, cost_model: CostModel | None, rates: PrefillRates | None = None
    ) -> None:
        self._settings = settings
        self._model = cost_model
        if rates is None and cost_model is not None:
            rates = PrefillRates(settings, cost_model)
        self._rates = rates
        self._least = settings.chunk.balanced_min_chunk
        self._round: _Round | None = None
        self._lived_s: float | None = None  # mean stage time, over as long as requests live
        self._recent_s: float | None = None  # and over the last rounds
        self._alone: tuple[str, int] = ("", 0)  # the prompt that is alone, and its chunk
        self.reason = ""
        self.target_s: float | None = None  # stage time of the last budget, if filled

    def budget(self, state: PipelineState) -> int | None:
        """Tokens for this micro-batch, decodes included."""
        now, tokens = self._round, state.prefill_backlog()
        if (
            now is None
            or not state.step % now.period
            or tokens > RISE * now.tokens
            or (now.alone and state.num_waiting)  # another one came
        ):
            now = self._round = self._decide(state, tokens)
            if now is None:
                return self._settings.chunk.fallback_tokens
        if now.alone:
            self.reason, self.target_s = "prompt alone", None
            return now.alone
        if now.seats_short:
            tokens = now.admissible
        wanted = state.decode_share * now.tokens_per_decode - int(-tokens // now.steps)
        self.reason = "no free seats" if now.seats_short else "backlog"
        if wanted > now.cap:
            wanted, self.reason = now.cap, "throughput cap"
        if wanted < now.deadline:
            wanted, self.reason = now.deadline, now.reason
        if wanted < self._least:
            wanted = self._least
        sizes = now.sizes
        index = min(bisect_left(sizes, wanted), len(sizes) - 1)
        self.target_s = now.seconds[index]
        return sizes[index]

    def _decide(self, state: PipelineState, tokens: int) -> "_Round | None":
        """What stays as it is for a round; None without a model to trust."""
        source, fallback = self._rates, why_fallback(self._model)
        if source is None or fallback:
            self.reason, self.target_s = fallback, None
            self._lived_s = self._recent_s = None
            return None
        knobs = self._settings.chunk
        now = _Round(max(state.pp_size, PERIOD), knobs.balanced_rounds * state.pp_size, tokens)
        if state.num_waiting + state.num_prefilling == 1 and not state.decodes_alive:
            now.alone = self._chunk_alone(source.model, state)
            return now
        rates = self._within_seats(source.model, state, source.at(state))
        now.sizes = [rate.tokens for rate in rates]
        now.seconds = [rate.seconds for rate in rates]
        now.tokens_per_decode = state.tokens_per_decode
        enough = knobs.balanced_throughput_ratio * rates[-1].prefill
        now.cap = next(r.tokens for r in rates if r.prefill >= enough)
        free_seats = max(state.max_num_seqs - state.num_running, 0)
        if state.num_waiting > free_seats or state.kv_free < knobs.kv_free_threshold:
            now.seats_short, now.cap = True, now.sizes[-1]
            admitted = islice(state.waiting, free_seats + state.num_prefilling)
            now.admissible = sum(prompt.new_tokens for prompt in admitted)
        elif state.num_waiting:
            now.deadline, now.reason = self._for_deadlines(state, source.head, rates)
        return now

    def _within_seats(
        self, model: CostModel, state: PipelineState, rates: Sequence[Rate]
    ) -> Sequence[Rate]:
        """Budgets whose stage time lets the decodes alive stay within seats and KV cache."""
        if not state.recent:
            return rates
        last = state.recent[-1]
        seconds = model.predict(
            last.num_tokens, last.prefills, last.num_decodes, last.decode_context
        )
        self._lived_s = _mean(self._lived_s, seconds, LIVED)
        self._recent_s = _mean(self._recent_s, seconds, RECENT)
        # Those who run now came in over a life of requests, at the stage times of that time: a
        # lull of some rounds frees no seat. Where the load grows the last rounds tell more.
        usual_s = max(self._lived_s, self._recent_s)
        longest_s = usual_s * state.max_num_seqs / max(state.num_running, 1)
        if state.kv_free < LITTLE_KV * self._settings.chunk.kv_free_threshold:
            longest_s = min(longest_s, self._recent_s / max(1.0 - state.kv_free, 1e-3))
        if rates[-1].seconds <= longest_s:
            return rates
        return [r for r in rates if r.seconds <= longest_s] or rates[:1]

    def _for_deadlines(
        self, state: PipelineState, head: Sequence[Waiting], rates: Sequence[Rate]
    ) -> tuple[int, str]:
        """The smallest budget that is fast enough for the waiting prompts, and why.

        Those behind the `head` of the queue count as if they had just come.
        """
        slo_ttft = self._settings.slo_ttft
        through_s = state.pp_size * rates[-1].seconds
        in_time_s = self._settings.chunk.balanced_deadline_ratio * slo_ttft - through_s
        lost_s = slo_ttft - through_s
        tokens, lost = 0, False
        needed = state.prefill_backlog() / max(in_time_s, NEAR)
        for _, new, _, waited_s, _ in head:
            tokens += new
            if waited_s >= lost_s:
                lost = True  # its own target is gone; those behind it wait for it
                continue
            least = tokens / max(in_time_s - waited_s, NEAR)
            if least > needed:
                needed = least
        for rate in rates:
            if not lost and rate.prefill >= needed:
                return rate.tokens, "deadline"
        return rates[-1].tokens, "fastest: deadlines at risk"

    def _chunk_alone(self, model: CostModel, state: PipelineState) -> int:
        prompt = next(iter(state.waiting))
        if self._alone[0] != prompt.request_id:
            self._alone = (prompt.request_id, fill_and_drain(model, prompt, state))
        return self._alone[1]


class _Round:
    """A round's decision; tokens throughout."""

    __slots__ = (
        "admissible",
        "alone",
        "cap",
        "deadline",
        "period",
        "reason",
        "seats_short",
        "seconds",
        "sizes",
        "steps",
        "tokens",
        "tokens_per_decode",
    )

    def __init__(self, period: int, steps: int, tokens: int) -> None:
        self.period = period  # steps it holds for
        self.steps = steps  # micro-batches over which the prompts go
        self.tokens = tokens  # at hand when it was made
        self.tokens_per_decode = 1
        self.sizes: list[int] = []  # budgets worth giving
        self.seconds: list[float] = []  # their stage times
        self.cap = 0
        self.deadline = 0  # least budget, 0 for any
        self.reason = ""  # of the deadline
        self.seats_short = False
        self.admissible = 0  # of prompts admitted, or with a free seat
        self.alone = 0  # the chunk of a prompt alone, 0 where none is


def _mean(before: float | None, newest: float, weight: float) -> float:
    return newest if before is None else before + weight * (newest - before)


def fill_and_drain(model: CostModel, prompt: Waiting, state: PipelineState) -> int:
    """The chunk with which a prompt alone is through the pipeline soonest, tokens.

    n equal chunks take n stage times, and the last one pp_size - 1 more.
    """
    length, before, behind = prompt.new_tokens, prompt.prefix_tokens, state.pp_size - 1
    best, best_s = state.max_budget, float("inf")
    for size in (*SIZES, state.max_budget):
        if size > state.max_budget:
            continue
        chunks = -(-length // size)
        new = -(-length // chunks)
        mean_s = model.predict(new, ((new, before + length // 2),), 0, 0)
        last_s = model.predict(new, ((new, before + length - new),), 0, 0)
        seconds = chunks * mean_s + behind * last_s
        if seconds < best_s:
            best, best_s = size, seconds
        if chunks == 1:
            break
    return best
