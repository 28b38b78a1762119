"""The loop of vLLM's `EngineCore` in virtual time, around any scheduler that an adapter drives.

One thread, as in vLLM: it polls for arrivals, fills the batch queue, else blocks on the oldest
batch. Ties: arrivals before aborts, each in the order given; both before the engine's turn.
"""

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from bench.clock import VirtualClock
from bench.engine_types import (
    Adapter,
    HostTime,
    RequestSpec,
    RunResult,
    ServedRequest,
    StepPlan,
    StepRecord,
)
from bench.pipeline import Pipeline


class EngineStuckError(RuntimeError):
    """The scheduler kept returning empty batches with requests waiting and nothing in flight."""


@dataclass(slots=True)
class _InFlight:
    scheduler_output: Any
    plan: StepPlan
    record: StepRecord
    grammar: Any = None


class Engine:
    """Runs one scheduler over one pipeline, once. Records stay readable after an error."""

    def __init__(
        self,
        scheduler: Any,
        pipeline: Pipeline,
        adapter: Adapter,
        *,
        host: HostTime | None = None,
        clock: VirtualClock | None = None,
        on_schedule: Callable[[Any], None] | None = None,
        keep_tokens: bool = False,
        max_empty_steps: int = 1000,
    ) -> None:
        self.scheduler = scheduler
        self.pipeline = pipeline
        self.adapter = adapter
        self.host = host or HostTime()
        self.clock = clock or VirtualClock()
        if hasattr(scheduler, "ppbalance"):
            scheduler.ppbalance.clock = self.clock
        self.result = RunResult({}, [], self.clock.monotonic(), [], [])
        self._on_schedule = on_schedule
        self._keep_tokens = keep_tokens
        self._max_empty_steps = max_empty_steps
        self._depth = adapter.queue_depth(scheduler)
        self._token_lag = adapter.token_lag(scheduler)
        self._queue: deque[_InFlight] = deque()
        self._lagging: deque[_InFlight] = deque(maxlen=self._token_lag)
        self._arrivals: deque[RequestSpec] = deque()
        self._aborts: deque[RequestSpec] = deque()
        self._alive_decodes = 0
        self._empty_steps = 0

    def run(self, requests: Iterable[RequestSpec], until_s: float | None = None) -> RunResult:
        """Serve `requests` until all are done, or the clock has passed `until_s` seconds.

        Raises EngineStuckError when `max_empty_steps` steps in a row could do nothing.
        """
        ordered = sorted(requests, key=lambda spec: spec.arrival_s)
        self._arrivals = deque(ordered)
        aborting = [spec for spec in ordered if spec.abort_s is not None]
        self._aborts = deque(sorted(aborting, key=lambda spec: spec.abort_s or 0.0))
        while until_s is None or self.clock.monotonic() <= until_s:
            self._poll()
            if not self.scheduler.has_requests() and not self._queue:
                if not self._arrivals:
                    break
                self.clock.set(self._arrivals[0].arrival_s)
                continue
            executed = self._turn()
            if not executed and self.scheduler.has_requests():
                self._spend(self.host.idle_s)
        self.result.end_s = self.clock.monotonic()
        return self.result

    def _spend(self, seconds: float) -> None:
        self.clock.set(self.clock.monotonic() + seconds)

    def _poll(self) -> None:
        """Take in what has arrived by now."""
        now_s = self.clock.monotonic()
        while self._arrivals and self._arrivals[0].arrival_s <= now_s:
            spec = self._arrivals.popleft()
            prompt = spec.prompt if isinstance(spec.prompt, int) else len(spec.prompt)
            self.result.requests[spec.request_id] = ServedRequest(
                spec.request_id, spec.arrival_s, prompt
            )
            self.adapter.add_request(self.scheduler, spec)
        self._process_aborts()

    def _process_aborts(self) -> None:
        due = []
        now_s = self.clock.monotonic()
        while self._aborts and (self._aborts[0].abort_s or 0.0) <= now_s:
            record = self.result.requests.get(self._aborts.popleft().request_id)
            if record is not None and not record.finished:
                record.finished = record.aborted = True
                self._alive_decodes -= record.num_tokens > 0
                due.append(record.request_id)
        if due:
            self.adapter.abort(self.scheduler, due)

    def _turn(self) -> bool:
        """One `step_with_batch_queue`; True when it scheduled a batch with tokens."""
        executed = False
        deferred: _InFlight | None = None
        if self.scheduler.has_requests():
            batch = self._schedule()
            executed = batch.plan.shape.num_tokens > 0
            if executed and batch.scheduler_output.pending_structured_output_tokens:
                deferred = batch
            else:
                if executed:
                    batch.grammar = self.adapter.grammar(self.scheduler, batch.scheduler_output)
                self._queue.append(batch)
                more = executed or self.scheduler.has_requests()
                if len(self._queue) < self._depth and more:
                    return executed
        self._finish_oldest()
        if deferred is not None:
            self._sample_deferred(deferred)
        return executed

    def _schedule(self) -> _InFlight:
        now_s = self.clock.monotonic()
        started = perf_counter()
        output = self.scheduler.schedule()
        self.result.schedule_us.append((perf_counter() - started) * 1e6)
        plan = self.adapter.plan(self.scheduler, output)
        if self._on_schedule is not None:
            self._on_schedule(output)
        rows = len(output.num_scheduled_tokens)
        self._spend(
            self.host.schedule_s
            + rows * self.host.schedule_per_request_s
            + len(output.scheduled_new_reqs) * self.host.schedule_per_new_request_s
        )
        self._check_progress(rows)
        step = len(self.result.steps)
        done_s = self.pipeline.submit(
            step, plan.shape, self.clock.monotonic(), self._tokens_ready_s()
        )
        running, waiting = self.adapter.counts(self.scheduler)
        preemptions = len(output.preempted_req_ids or ())
        record = StepRecord(
            step, now_s, done_s, plan.shape, self._alive_decodes, running, waiting, preemptions
        )
        self.result.steps.append(record)
        batch = _InFlight(output, plan, record)
        self._lagging.append(batch)
        return batch

    def _tokens_ready_s(self) -> float:
        """When the tokens sampled `token_lag` steps ago, if any, have left the last stage."""
        if not self._token_lag or len(self._lagging) < self._token_lag:
            return 0.0
        source = self._lagging[0]
        return source.record.done_s if source.plan.sampling else 0.0

    def _check_progress(self, rows: int) -> None:
        in_flight = any(batch.plan.shape.num_tokens for batch in self._queue)
        self._empty_steps = 0 if rows or in_flight else self._empty_steps + 1
        if self._empty_steps <= self._max_empty_steps:
            return
        running, waiting = self.adapter.counts(self.scheduler)
        raise EngineStuckError(
            f"{self._empty_steps} empty steps in a row at {self.clock.monotonic():.6f} s with "
            f"nothing in flight, {running} requests running and {waiting} waiting: the scheduler "
            "holds everything, or a request does not fit the KV cache"
        )

    def _finish_oldest(self) -> None:
        batch = self._queue.popleft()
        self.clock.set(max(self.clock.monotonic(), batch.record.done_s))
        self._process_aborts()
        model_output = self.adapter.model_output(
            self.scheduler, batch.scheduler_output, batch.plan, batch.grammar
        )
        started = perf_counter()
        outputs = self.scheduler.update_from_output(batch.scheduler_output, model_output)
        self.result.update_us.append((perf_counter() - started) * 1e6)
        rows = len(batch.scheduler_output.num_scheduled_tokens)
        self._spend(self.host.update_s + rows * self.host.update_per_request_s)
        for request_id, token_ids, finished in self.adapter.collect(
            self.scheduler, batch.plan, outputs
        ):
            self._record_tokens(request_id, token_ids, finished)

    def _record_tokens(self, request_id: str, token_ids: list[int], finished: bool) -> None:
        record = self.result.requests[request_id]
        now_s = self.clock.monotonic()
        if token_ids:
            if record.first_token_s is None:
                record.first_token_s = now_s
                self._alive_decodes += 1
            record.last_token_s = now_s
            record.num_tokens += len(token_ids)
            if self._keep_tokens:
                record.token_ids += token_ids
                record.token_times_s += [now_s] * len(token_ids)
        if finished:
            record.finished = True
            self._alive_decodes -= record.num_tokens > 0

    def _sample_deferred(self, batch: _InFlight) -> None:
        """Its grammar had to see the tokens of the batch before; the last stage waited for it."""
        batch.grammar = self.adapter.grammar(self.scheduler, batch.scheduler_output)
        now_s = self.clock.monotonic()
        self.pipeline.hold_last_stage(now_s)
        batch.record.done_s = max(batch.record.done_s, now_s)
        self._queue.append(batch)
