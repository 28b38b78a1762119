"""Balanced: equal micro-batches, as large as the demand asks and no larger."""

from itertools import islice

from vllm_ppbalance.chunk.guards import decode_share, mean_context, why_fallback
from vllm_ppbalance.config import Settings
from vllm_ppbalance.cost_model import CostModel
from vllm_ppbalance.prefill_rates import SIZES, PrefillRates, Rate
from vllm_ppbalance.state import PipelineState, Waiting

SETTLING = 0.2  # weight of the newest round in the mean stage time
NEAR = 0.005  # s; least time to a deadline that a rate is computed from
FIRST = 64  # waiting prompts whose deadlines are looked at, from the head of the queue
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
        self._round = _Round([], 0, False, 0)
        self._next_step = 0
        self._mean_s: float | None = None  # stage time, over the last rounds
        self._alone: tuple[str, int] = ("", 0)  # the prompt that is alone, and its chunk
        self.reason = ""

    def budget(self, state: PipelineState) -> int | None:
        """Tokens for this micro-batch, decodes included."""
        fallback = why_fallback(self._model)
        if self._model is None or self._rates is None or fallback:
            self.reason, self._next_step, self._mean_s = fallback, 0, None
            return self._settings.chunk.fallback_tokens
        decodes = decode_share(state)
        if not state.decodes_alive and state.num_waiting + state.num_prefilling == 1:
            self.reason = "prompt alone"
            self._next_step = 0
            return self._chunk_alone(self._model, state)
        tokens = state.prefill_backlog()
        if state.step >= self._next_step or tokens > RISE * self._round.tokens:
            self._next_step = state.step + state.pp_size
            self._decide(self._rates, state, decodes, tokens)
        now = self._round
        if now.seats_short:
            tokens = _admissible(state)
        rounds = self._settings.chunk.balanced_rounds * state.pp_size
        wanted = decodes * state.tokens_per_decode - int(-tokens // rounds)
        self.reason = "no free seats" if now.seats_short else "backlog"
        if wanted > now.cap:
            wanted, self.reason = now.cap, "throughput cap"
        if wanted < now.deadline:
            wanted, self.reason = now.deadline, now.reason
        wanted = max(wanted, self._settings.chunk.balanced_min_chunk)
        return next((r.tokens for r in now.rates if r.tokens >= wanted), now.rates[-1].tokens)

    def _decide(
        self, source: PrefillRates, state: PipelineState, decodes: int, tokens: int
    ) -> None:
        """What stays as it is for a round."""
        rates = list(source.at(state, decodes, int(decodes * mean_context(state))))
        rates = self._within_seats(source.model, state, rates)
        enough = self._settings.chunk.balanced_throughput_ratio * rates[-1].prefill
        cap = next(r.tokens for r in rates if r.prefill >= enough)
        seats_short = state.num_waiting > max(state.max_num_seqs - state.num_running, 0)
        seats_short |= state.kv_free < self._settings.chunk.kv_free_threshold
        deadline, reason = 0, ""
        if seats_short:
            cap = rates[-1].tokens
        elif state.num_waiting:
            deadline, reason = self._for_deadlines(state, rates)
        self._round = _Round(rates, cap, seats_short, tokens, deadline, reason)

    def _within_seats(
        self, model: CostModel, state: PipelineState, rates: list[Rate]
    ) -> list[Rate]:
        """Budgets whose stage time lets the decodes alive stay within seats and KV cache."""
        recent = state.recent
        if not recent:
            return rates
        seconds = sum(
            model.predict(b.num_tokens, b.prefills, b.num_decodes, b.decode_context) for b in recent
        ) / len(recent)
        if self._mean_s is not None:
            seconds = self._mean_s + SETTLING * (seconds - self._mean_s)
        self._mean_s = seconds
        taken = state.num_running / state.max_num_seqs
        if state.kv_free < LITTLE_KV * self._settings.chunk.kv_free_threshold:
            taken = max(taken, 1.0 - state.kv_free)
        longest_s = seconds / max(taken, 1e-3)
        return [r for r in rates if r.seconds <= longest_s] or rates[:1]

    def _for_deadlines(self, state: PipelineState, rates: list[Rate]) -> tuple[int, str]:
        """The smallest budget that is fast enough for the waiting prompts, and why; 0 for any."""
        slo_ttft = self._settings.slo_ttft
        through_s = state.pp_size * rates[-1].seconds
        in_time_s = self._settings.chunk.balanced_deadline_ratio * slo_ttft - through_s
        lost_s = slo_ttft - through_s
        tokens, needed, lost = 0, 0.0, False
        for prompt in islice(state.waiting, FIRST):
            tokens += prompt.new_tokens
            if prompt.waited_s >= lost_s:
                lost = True  # its own target is gone; those behind it wait for it
                continue
            needed = max(needed, tokens / max(in_time_s - prompt.waited_s, NEAR))
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
    """A round's decision."""

    __slots__ = ("cap", "deadline", "rates", "reason", "seats_short", "tokens")

    def __init__(
        self,
        rates: list[Rate],
        cap: int,
        seats_short: bool,
        tokens: int,
        deadline: int = 0,
        reason: str = "",
    ) -> None:
        self.rates = rates
        self.cap = cap
        self.seats_short = seats_short
        self.tokens = tokens  # prompt tokens at hand when it was made
        self.deadline = deadline  # least budget, 0 for none
        self.reason = reason


def _admissible(state: PipelineState) -> int:
    """Tokens of the prompts that are admitted or would find a free seat."""
    seats = max(state.max_num_seqs - state.num_running, 0) + state.num_prefilling
    return sum(prompt.new_tokens for prompt in islice(state.waiting, seats))


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
