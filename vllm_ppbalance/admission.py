"""Which waiting requests go first when not all can meet their TTFT target.

The queue stays first come, first served until then. After that as many as possible are served in
time: Moore and Hodgson's rule (1968) goes through the jobs by deadline and, whenever one would be
late, puts off the longest so far, which leaves the fewest late jobs there can be.
"""

from collections.abc import Iterable
from heapq import heappop, heappush
from itertools import islice
from typing import NamedTuple

from vllm_ppbalance.config import Settings
from vllm_ppbalance.prefill_rates import PrefillRates
from vllm_ppbalance.state import Order, PipelineState


class Pace(NamedTuple):
    """How fast prompts are computed now."""

    tokens_s: float  # prompt tokens a second
    through_s: float  # seconds from a prompt's last chunk to its first token
    ahead: int  # prompt tokens of requests already admitted
    uncached: float = 1.0  # share of a prompt that is not in the prefix cache


NO_CHANGE = Order()
EASY = 2.0  # times slower than last known that the pace may be for all to be in time
EASY_ROUNDS = 16  # for which the pace counts as known


def pace_of(
    state: PipelineState, rates: PrefillRates, budget: int | None, cached_share: float
) -> Pace:
    """The pace at `budget` tokens a micro-batch, or at the fastest one for None."""
    known = rates.at(state)
    best = known[-1]
    if budget is not None:
        best = next((r for r in reversed(known) if r.tokens <= budget), known[0])
    admitted = islice(state.waiting, state.num_prefilling)  # the first ones of `waiting`
    ahead = sum(prompt.new_tokens for prompt in admitted)
    return Pace(best.prefill, state.pp_size * best.seconds, ahead, 1.0 - cached_share)


class OnTimeFirst:
    """Keeps the waiting requests that can be in time before those that cannot.

    A request that is put off stays behind until it is admitted: when no other one waits, or from
    `admission.late_share` of the prompt tokens computed, oldest first, so nobody waits for ever.
    """

    def __init__(self, settings: Settings) -> None:
        self._slo_ttft = settings.slo_ttft
        self._late_share = settings.admission.late_share
        self._on_time: dict[str, tuple[int, float]] = {}  # tokens, arrival on the wall clock
        self._tokens = 0  # of those
        self._late: dict[str, int] = {}  # tokens, in the order they were put off
        self._behind = True  # nobody on time stands behind a late one
        self._computed: int | None = None  # prompt tokens, when last looked at
        self._credit = 0.0  # prompt tokens the late ones may have
        self._pace: Pace | None = None  # when last looked at
        self._rounds = 0  # since then

    @property
    def num_late(self) -> int:
        """Waiting requests that were put off."""
        return len(self._late)

    def arrived(self, request_id: str, num_tokens: int, arrival_s: float) -> None:
        """A request came in, at the end of the queue; `arrival_s` is on the wall clock."""
        self._on_time[request_id] = (num_tokens, arrival_s)
        self._tokens += num_tokens
        self._behind = self._behind and not self._late

    def left(self, request_ids: Iterable[str]) -> None:
        """Requests were admitted, finished or aborted; unknown ones are ignored."""
        for request_id in request_ids:
            known = self._on_time.pop(request_id, None)
            if known is None:
                self._late.pop(request_id, None)
            else:
                self._tokens -= known[0]

    def at_ease(self, left: int, now_s: float, computed: int) -> bool:
        """Whether all are in time by far, with `left` prompt tokens to compute, admitted ones' too.

        Then `order` would change nothing, and its `pace`, which takes time to find, is not needed.
        Asked once a round; like `order` it notes what was `computed`.
        """
        pace, self._rounds = self._pace, self._rounds + 1
        if pace is None or self._rounds > EASY_ROUNDS or self._late or not self._behind:
            return False
        oldest = next(iter(self._on_time.values()), None)
        if oldest is not None:
            needed_s = EASY * (pace.through_s + left / pace.tokens_s)
            if now_s + needed_s > oldest[1] + self._slo_ttft:
                return False
        self._computed, self._credit = computed, 0.0
        return True

    def order(self, pace: Pace, now_s: float, computed: int) -> Order:
        """What to change, given `computed` prompt tokens so far and the wall clock."""
        self._pace, self._rounds = pace, 0
        behind = not self._put_off(pace, now_s) and self._behind
        first = self._forgiven(computed)
        last = () if behind else tuple(self._late)
        self._behind = True
        late = len(first) + len(self._late)
        return Order(first, last, late) if first or last else NO_CHANGE

    def _put_off(self, pace: Pace, now_s: float) -> bool:
        waiting = self._on_time
        if not waiting:
            return False
        if not self._late:  # all before the first deadline, mostly
            oldest_s = next(iter(waiting.values()))[1]
            work_s = (pace.ahead + self._tokens * pace.uncached) / pace.tokens_s
            if now_s + pace.through_s + work_s <= oldest_s + self._slo_ttft:
                return False
        tokens_s = pace.tokens_s * (1.0 - self._late_share if self._late else 1.0)
        due_s = self._slo_ttft - pace.through_s - now_s
        tokens: float = pace.ahead
        kept: list[tuple[float, str]] = []
        late: list[str] = []
        for request_id, (prompt, arrival_s) in waiting.items():
            new = prompt * pace.uncached
            if arrival_s + due_s < new / tokens_s:
                late.append(request_id)  # not even alone
                continue
            tokens += new
            heappush(kept, (-new, request_id))
            if tokens > (arrival_s + due_s) * tokens_s:
                longest, put_off = heappop(kept)
                tokens += longest
                late.append(put_off)
        for request_id in late:
            self._late[request_id] = waiting.pop(request_id)[0]
            self._tokens -= self._late[request_id]
        return bool(late)

    def _forgiven(self, computed: int) -> tuple[str, ...]:
        """Late requests whose turn it is."""
        before, self._computed = self._computed, computed
        if not self._late:
            self._credit = 0.0
            return ()
        if before is not None and computed > before:
            self._credit += self._late_share * (computed - before)
        first = []
        while self._late:
            request_id, tokens = next(iter(self._late.items()))
            if self._credit < tokens:
                break
            self._credit -= tokens
            del self._late[request_id]
            first.append(request_id)
        return tuple(first)
