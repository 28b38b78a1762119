"""Keeps the pipeline's decodes by cohort: ready now, in flight, or held until a later step.

Works on request ids with set operations only, so that its cost per step stays at microseconds.
"""

from collections import deque
from collections.abc import Iterable, Mapping, Set

from vllm_ppbalance.state import MicroBatch


class Cohorts:
    """Which decodes could run in the next micro-batch, and where all the others are.

    `by_step` tells when a decode may run again: pp_size steps after it last ran (asynchronous
    scheduling, Model Runner V2), or as soon as its micro-batch is complete (synchronous).
    """

    def __init__(self, pp_size: int, *, by_step: bool) -> None:
        self.pp_size = pp_size
        self.ready: set[str] = set()
        self.parked: dict[int, set[str]] = {}  # step of return -> held decodes
        self.holds_in_a_row: dict[str, int] = {}
        self.recent: deque[MicroBatch] = deque(maxlen=pp_size)
        self._by_step = by_step
        self.in_flight: deque[MicroBatch] = deque()  # oldest first
        # Who asks to decode after each; shrinks as requests finish or lose their KV blocks.
        self._next_decodes: deque[set[str]] = deque()

    def begin_step(self, step: int, finished: Iterable[str]) -> None:
        """Bring `ready` up to date for `step`; `finished` are the requests gone since the last."""
        for request_id in finished:
            self.forget(request_id)
        if self._by_step:
            while self.in_flight and self.in_flight[0].step <= step - self.pp_size:
                self._land()
        if self.parked:
            for due in [due for due in self.parked if due <= step]:
                self.ready |= self.parked.pop(due)

    def scheduled(
        self, batch: MicroBatch, ran: Set[str], prompts: Set[str], ended: Set[str]
    ) -> None:
        """Note a non-empty micro-batch: the ids of its rows, of its prompts, of those that end."""
        if len(self.ready) == batch.num_decodes:
            next_decodes, self.ready = self.ready, set()  # only ready ones run: these are all
        else:
            next_decodes = set(ran)
            next_decodes -= prompts
            self.ready -= next_decodes
        next_decodes |= ended
        if self.holds_in_a_row:
            for request_id in self.holds_in_a_row.keys() & ran:
                del self.holds_in_a_row[request_id]
        self.in_flight.append(batch)
        self._next_decodes.append(next_decodes)
        self.recent.append(batch)

    def completed(self, step: int) -> None:
        """Note that micro-batch `step` came out of the last stage."""
        if not self._by_step:
            while self.in_flight and self.in_flight[0].step <= step:
                self._land()

    def hold(self, holds: Mapping[str, int], step: int) -> None:
        """Park ready decodes, each for its number of steps from `step` on."""
        for request_id, steps in holds.items():
            self.ready.discard(request_id)
            self.parked.setdefault(step + steps, set()).add(request_id)
            self.holds_in_a_row[request_id] = self.holds_in_a_row.get(request_id, 0) + steps

    def release(self) -> Mapping[int, set[str]]:
        """All held decodes are ready again; returns them by the step they were held until."""
        released, self.parked = self.parked, {}
        self.ready = self.ready.union(*released.values())
        return released

    def forget(self, request_id: str) -> bool:
        """Drop a request that finished or lost its KV blocks; True if it was being held."""
        self.ready.discard(request_id)
        self.holds_in_a_row.pop(request_id, None)
        for next_decodes in self._next_decodes:
            next_decodes.discard(request_id)
        held = False
        for parked in self.parked.values():
            held |= request_id in parked
            parked.discard(request_id)
        return held

    def parked_counts(self) -> dict[int, int]:
        """Held decodes by the step they return at."""
        if not self.parked:
            return {}
        return {step: len(ids) for step, ids in self.parked.items() if ids}

    def _land(self) -> None:
        self.in_flight.popleft()
        landed = self._next_decodes.popleft()
        # Nobody else needs the set of a micro-batch that is done.
        self.ready = self.ready | landed if self.ready else landed
