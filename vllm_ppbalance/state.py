"""What a policy sees and what it answers: frozen values, no vLLM objects.

Times are seconds on the injected clock, counts are tokens or requests, `step` is the number of
the `schedule()` call about to be made (vLLM's `Scheduler.current_step` after it increments).
What is made anew at every step is a named tuple: as frozen as a frozen dataclass, made in a third
of the time.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple, Protocol


class Clock(Protocol):
    """The two clocks of vLLM's scheduler; virtual time injects its own."""

    def monotonic(self) -> float:
        """Seconds on a clock that never goes back (step times)."""

    def time(self) -> float:
        """Seconds since the epoch (`Request.arrival_time` is on this clock)."""


class Decode(NamedTuple):
    """One established decode that could run in the step about to be formed."""

    request_id: str
    context_tokens: int  # tokens whose keys and values it reads
    output_tokens: int  # tokens generated so far
    holds_in_a_row: int  # steps it has been held back since it last ran
    last_token_s: float  # when its newest token came out; 0 where unknown
    first_token_s: float = 0.0  # when its first token came out; 0 where unknown


class Waiting(NamedTuple):
    """One request that still has prompt tokens to compute: queued, or prefilling in chunks."""

    request_id: str
    new_tokens: int  # prompt tokens still to compute
    prefix_tokens: int  # prompt tokens already computed or known to be cached
    waited_s: float  # since arrival
    running: bool = False  # admitted: its prompt is being computed chunk by chunk


class MicroBatch(NamedTuple):
    """One non-empty `schedule()` result on its way through the stages."""

    step: int
    num_requests: int
    num_decodes: int  # rows that are established decodes
    decode_tokens: int  # their tokens: more than num_decodes with draft tokens
    decode_context: int  # tokens whose keys and values the decodes read, summed
    # (new tokens, tokens before them) of each prompt chunk; those that end their prompt come first
    prefills: tuple[tuple[int, int], ...]
    next_decodes: int  # rows that will ask to decode when this batch is done

    @property
    def prefill_tokens(self) -> int:
        """Prompt tokens in the micro-batch."""
        return sum(new for new, _ in self.prefills)

    @property
    def num_tokens(self) -> int:
        """Tokens in the micro-batch, decodes included."""
        return self.decode_tokens + self.prefill_tokens


class LatencyTotals(NamedTuple):
    """Sums since the engine started; a policy subtracts the totals it saw last."""

    ttft_s: float = 0.0
    first_tokens: int = 0
    gap_s: float = 0.0
    gaps: int = 0

    def since(self, earlier: "LatencyTotals") -> "LatencyTotals":
        """What came after `earlier`."""
        return LatencyTotals(
            self.ttft_s - earlier.ttft_s,
            self.first_tokens - earlier.first_tokens,
            self.gap_s - earlier.gap_s,
            self.gaps - earlier.gaps,
        )

    @property
    def mean_ttft_s(self) -> float | None:
        """Mean time to first token, None when there was none."""
        return self.ttft_s / self.first_tokens if self.first_tokens else None

    @property
    def mean_gap_s(self) -> float | None:
        """Mean gap between two tokens of a request, None when there was none."""
        return self.gap_s / self.gaps if self.gaps else None


class PipelineState(NamedTuple):
    """The pipeline just before micro-batch `step` is formed.

    `in_flight` holds the at most pp_size - 1 newest micro-batches that were scheduled before this
    one, oldest first, empty ones left out; together with the ready decodes they are the pp_size
    cohorts. It and `recent` are read in their step only: they go on with the pipeline. `parked`
    counts decodes held for more than one step, by the step they return at.
    """

    step: int
    now_s: float
    pp_size: int
    max_budget: int  # tokens; vLLM's max_num_batched_tokens, never exceeded
    min_budget: int  # tokens; under it a running request could make no progress
    decode_budget: int  # tokens that the ready decodes need, draft tokens included
    num_ready: int  # decodes that can run now; may count one whose last token is in flight
    ready: Sequence[Decode]  # exactly those, oldest first
    in_flight: Sequence[MicroBatch] = ()
    recent: Sequence[MicroBatch] = ()  # the pp_size newest non-empty micro-batches, oldest first
    parked: Mapping[int, int] = MappingProxyType({})
    num_waiting: int = 0
    num_prefilling: int = 0  # admitted requests whose prompt is being computed chunk by chunk
    waiting: Sequence[Waiting] = ()
    waiting_tokens: int | None = None  # sum of `new_tokens` over `waiting`; None: not kept
    arrived_tokens: int = 0  # prompt tokens of all requests since the engine started
    kv_free: float = 1.0  # share of the KV cache that is free, 0 to 1
    totals: LatencyTotals = LatencyTotals()
    num_running: int = 0  # admitted requests: decoding, or computing their prompt
    max_num_seqs: int = 1 << 20  # requests that vLLM admits at a time
    planned_prefill: int = 0  # prompt tokens this step will carry, if nobody is held; last

    def planning(self, prefill: int) -> "PipelineState":
        """The same with `prefill` as its `planned_prefill`, faster than `_replace`."""
        return tuple.__new__(PipelineState, (*self[:-1], prefill))

    @property
    def tokens_per_decode(self) -> int:
        """Tokens that one decode needs, draft tokens included."""
        return self.decode_budget // self.num_ready if self.num_ready else 1

    @property
    def decodes_alive(self) -> int:
        """Decodes of all cohorts: ready, in flight, and parked."""
        alive = self.num_ready
        for batch in self.in_flight:
            alive += batch.next_decodes
        return alive + sum(self.parked.values()) if self.parked else alive

    @property
    def decode_share(self) -> int:
        """Live decodes / pp_size for this step; the remainder rotates over the steps."""
        share, rest = divmod(self.decodes_alive, self.pp_size)
        return share + (self.step % self.pp_size < rest)

    @property
    def mean_context(self) -> float:
        """Tokens a decode reads, on average over the recent micro-batches."""
        decodes = sum(batch.num_decodes for batch in self.recent)
        return sum(batch.decode_context for batch in self.recent) / decodes if decodes else 0.0

    @property
    def waits(self) -> bool:
        """Whether there are prompts to compute, waiting or half computed."""
        return bool(self.num_waiting or self.num_prefilling)

    def prefill_backlog(self) -> int:
        """Prompt tokens still to compute, of waiting and of half-computed prompts."""
        if self.waiting_tokens is not None:
            return self.waiting_tokens
        if not self.waits:
            return 0
        return sum(prompt.new_tokens for prompt in self.waiting)

    def cohort_sizes(self) -> list[int]:
        """Decodes per cohort, pp_size numbers: this step's first, then those of the next steps."""
        sizes = [0] * self.pp_size
        sizes[0] = self.num_ready
        for batch in self.in_flight:
            sizes[(batch.step - self.step) % self.pp_size] += batch.next_decodes
        for step, count in self.parked.items():
            sizes[(step - self.step) % self.pp_size] += count
        return sizes


class Order(NamedTuple):
    """Changes to the waiting queue: request ids to put first, and last, each in this order.

    Without `last`, the last `late` requests of the queue are those put off before, `first` the
    foremost of them.
    """

    first: tuple[str, ...] = ()
    last: tuple[str, ...] = ()
    late: int = 0


class Decision(NamedTuple):
    """What a step's micro-batch may hold.

    `budget` is in tokens, decodes included. `hold` maps a ready decode to the number of steps it
    sits out, 1 to pp_size - 1. `reason` is a word of the chunk policy's for the budget. `order`
    changes the waiting queue before the micro-batch is formed.
    """

    budget: int
    hold: Mapping[str, int] = MappingProxyType({})
    reason: str = ""
    order: Order = Order()


class ChunkPolicy(Protocol):
    """Chooses the token budget of the next micro-batch."""

    def budget(self, state: PipelineState) -> int | None:
        """Tokens for the next micro-batch, decodes included; None leaves vLLM's own."""


class RebalancePolicy(Protocol):
    """Chooses which ready decodes sit out the next micro-batch."""

    def hold(self, state: PipelineState) -> Mapping[str, int]:
        """Request ids to hold, each with its number of steps."""
