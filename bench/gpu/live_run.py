"""One run on a live engine: requests in real time, the engine's steps, and what they took."""

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from bench.gpu.live_engine import LiveEngine
from bench.measures import RequestRecord
from bench.workloads import BenchRequest

Steps = list[dict[str, float]]


@dataclass
class Ran:
    """What one run gave: its length in seconds, its requests, its step log."""

    wall_s: float
    records: list[RequestRecord]
    steps: Steps


def serve(live: LiveEngine, requests: list[BenchRequest], limit_s: float) -> Ran:
    """Serve `requests` at their times. Raises TimeoutError after `limit_s`."""
    served: dict[str, Served] = {}
    waiting = deque(sorted(requests, key=lambda request: request.arrival_s))
    steps: Steps = []
    started, wall = time.monotonic(), time.time()
    with watched(live.scheduler, steps):
        while waiting or live.busy:
            now_s = time.monotonic() - started
            if now_s > limit_s:
                raise TimeoutError(f"{len(served)} requests not served within {limit_s} s")
            while waiting and waiting[0].arrival_s <= now_s:
                request = waiting.popleft()
                name = live.add(request, wall + request.arrival_s)
                served[name] = Served(name, request.arrival_s, request.prompt_tokens)
            if not live.busy:
                time.sleep(min(max(waiting[0].arrival_s - now_s, 0.0), 0.01))
                continue
            rows = live.step()
            now_s = time.monotonic() - started
            for name, count, _ in rows:
                if name in served and count:
                    served[name].note(count, now_s)
    records = [one.record() for one in served.values()]
    return Ran(time.monotonic() - started, records, steps)


def serve_alone(
    live: LiveEngine, requests: list[BenchRequest], limit_s: float, pause_s: float = 0.0
) -> Ran:
    """Serve `requests` one at a time, each on an engine that was idle for `pause_s`."""
    whole = Ran(0.0, [], [])
    for request in requests:
        ran = serve(live, [replace(request, arrival_s=pause_s)], limit_s - whole.wall_s)
        whole.wall_s += ran.wall_s
        whole.records += ran.records
        whole.steps += ran.steps
    return whole


@dataclass
class Served:
    """What came back of one request; times in seconds since the run began."""

    name: str
    arrival_s: float
    prompt_tokens: int
    first_s: float = 0.0
    last_s: float = 0.0
    tokens: int = 0

    def note(self, count: int, now_s: float) -> None:
        """Count new tokens."""
        self.first_s = self.first_s if self.tokens else now_s
        self.last_s = now_s
        self.tokens += count

    def record(self) -> RequestRecord:
        """As `bench.measures` takes it."""
        return RequestRecord(
            self.name, self.arrival_s, self.first_s, self.last_s, self.prompt_tokens, self.tokens
        )


@contextmanager
def watched(scheduler: Any, steps: Steps) -> Iterator[None]:
    """Logs each schedule(): tokens, decodes, running, waiting, microseconds of ours and vLLM's.

    And each completion, as `done`: monotonic seconds and tokens.
    """
    patched = _timed(scheduler, steps)
    for name, method in patched.items():
        setattr(scheduler, name, method)
    try:
        yield
    finally:
        for name in patched:
            delattr(scheduler, name)


def _timed(scheduler: Any, steps: Steps) -> dict[str, Any]:
    schedule, update = scheduler.schedule, scheduler.update_from_output
    guard: Any = getattr(scheduler, "_guard", None)  # vLLM's own scheduler has none
    ours = [0.0]

    def timed_guard(hook: Any, *args: Any) -> None:
        began = time.perf_counter()
        guard(hook, *args)
        ours[0] += time.perf_counter() - began

    def timed_schedule(*args: Any, **kwargs: Any) -> Any:
        ours[0], began = 0.0, time.perf_counter()
        output = schedule(*args, **kwargs)
        whole = time.perf_counter() - began
        running, waiting = scheduler.get_request_counts()
        counts = output.num_scheduled_tokens.values()
        steps.append(
            {
                "t": time.monotonic(),
                "step": scheduler.current_step,
                "tok": output.total_num_scheduled_tokens,
                "rows": len(counts),
                "dec": sum(1 for n in counts if n == 1),
                "run": running,
                "wait": waiting,
                "sch_us": round((whole - ours[0]) * 1e6, 1),
                "own_us": round(ours[0] * 1e6, 1),
            }
        )
        return output

    def timed_update(output: Any, *args: Any, **kwargs: Any) -> Any:
        steps.append({"done": time.monotonic(), "tok": output.total_num_scheduled_tokens})
        return update(output, *args, **kwargs)

    patched = {"schedule": timed_schedule, "update_from_output": timed_update}
    return {**patched, "_guard": timed_guard} if guard else patched


def decode_spread(steps: Steps, pp_size: int) -> float | None:
    """Mean over rounds of the most decodes in a micro-batch minus the fewest; None: no rounds."""
    counts = [int(step["dec"]) for step in steps if step.get("dec")]
    rounds = [counts[at : at + pp_size] for at in range(0, len(counts) - pp_size + 1, pp_size)]
    if not rounds:
        return None
    return sum(max(one) - min(one) for one in rounds) / len(rounds)
