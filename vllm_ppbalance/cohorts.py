"""Keeps the pipeline's decodes by cohort: ready now, in flight, or held until a later step.

Works on request ids with set operations only, so that its cost per step stays at microseconds.
"""

from collections import deque
from collections.abc import Iterable, Mapping, Set
from typing import NamedTuple

from vllm_ppbalance.state import MicroBatch


class Flight(NamedTuple):
    """A micro-batch in flight with the requests that will ask to decode after it."""

    batch: MicroBatch
    next_decodes: set[str]  # shrinks as requests finish or lose their KV blocks in flight


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
        self._in_flight: deque[Flight] = deque()

    def begin_step(self, step: int, finished: Iterable[str]) -> None:
        """Bring `ready` up to date for `step`; `finished` are the requests gone since the last."""
        for request_id in finished:
            self.forget(request_id)
        if self._by_step:
            while self._in_flight and self._in_flight[0].batch.step <= step - self.pp_size:
                self._land()
        if self.parked:
            for due in [due for due in self.parked if due <= step]:
                self.ready |= self.parked.pop(due)

    def scheduled(self, flight: Flight, ran: Set[str]) -> None:
        """Note a non-empty micro-batch; `ran` holds the ids of all its rows."""
        if len(self.ready) == flight.batch.num_decodes:
            self.ready = set()  # only ready decodes run, so these are all of them
        else:
            self.ready.difference_update(ran)
        if self.holds_in_a_row:
            for request_id in self.holds_in_a_row.keys() & ran:
                del self.holds_in_a_row[request_id]
        self._in_flight.append(flight)
        self.recent.append(flight.batch)

    def completed(self, step: int) -> None:
        """Note that micro-batch `step` came out of the last stage."""
        if not self._by_step:
            while self._in_flight and self._in_flight[0].batch.step <= step:
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
        for flight in self._in_flight:
            flight.next_decodes.discard(request_id)
        held = False
        for parked in self.parked.values():
            held |= request_id in parked
            parked.discard(request_id)
        return held

    def in_flight(self) -> list[MicroBatch]:
        """The other cohorts' micro-batches after `begin_step`, oldest first."""
        return [flight.batch for flight in self._in_flight]

    def parked_counts(self) -> dict[int, int]:
        """Held decodes by the step they return at."""
        if not self.parked:
            return {}
        return {step: len(ids) for step, ids in self.parked.items() if ids}

    def _land(self) -> None:
        landed = self._in_flight.popleft().next_decodes
        # Nobody else needs the set of a micro-batch that is done.
        self.ready = self.ready | landed if self.ready else landed
