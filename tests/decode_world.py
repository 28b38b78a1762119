"""A small pipeline for rebalancing: our controller and cohorts, requests as counts, no vLLM.

Stages are equal. A micro-batch starts on the first stage once the one before it has left it, and
once the tokens its decodes need have left the last, pp_size steps before.
"""

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from vllm_ppbalance.controller import Controller
from vllm_ppbalance.lazy import Lazy
from vllm_ppbalance.rebalance import make_rebalance_policy
from vllm_ppbalance.state import Decode, MicroBatch, PipelineState

StageTime = Callable[[int, tuple[tuple[int, int], ...], int, int], float]


class Clock:
    """Virtual seconds, for both clocks."""

    now_s = 0.0

    def monotonic(self):
        return self.now_s

    def time(self):
        return self.now_s


@dataclass
class Served:
    """One request: what it asks for, and when its tokens came."""

    name: str
    arrival_s: float
    prompt: int
    output: int
    computed: int = 0
    tokens: int = 0
    first_s: float = 0.0
    last_s: float = 0.0
    ready_step: int = 0
    longest_wait: int = 0  # steps between being able to run and running
    holds: list[int] = field(default_factory=list)  # steps at which it was held
    gone: bool = False

    @property
    def tpot_s(self):
        return (self.last_s - self.first_s) / max(self.tokens - 1, 1)


class World:
    """Serves `requests` step by step on `pp_size` stages of `stage` seconds each."""

    def __init__(self, settings, pp_size, stage: StageTime, requests, *, chunk=8192, model=None):
        self.own = Controller(settings, pp_size, "step")
        if model is not None:
            self.own.rebalance = make_rebalance_policy(settings, model)
        self.clock = self.own.clock = Clock()
        self.pp_size, self.stage, self.chunk = pp_size, stage, chunk
        self.arrivals = deque(requests)
        self.queue: deque[Served] = deque()
        self.alive: dict[str, Served] = {}
        self.ended: list[Served] = []
        self.step = 0
        self.free_s = [0.0] * pp_size  # when each stage is free
        self.done_s: dict[int, float] = {}  # step -> end on the last stage
        self.pending: deque[tuple[int, list[Served]]] = deque()
        self.gone: set[str] = set()
        self.held: dict[str, int] = {}  # in the newest step
        self.sizes: list[int] = []  # decodes of each step

    def run(self, steps):
        """At most `steps` micro-batches; ends when all are served."""
        for _ in range(steps):
            if not (self.arrivals or self.queue or self.alive):
                break
            self.one_step()
        return self

    def one_step(self):
        self.step += 1
        start_s = max(self.free_s[0], self.done_s.pop(self.step - self.pp_size, 0.0))
        if not (self.queue or self.alive) and self.arrivals:
            start_s = max(start_s, self.arrivals[0].arrival_s)
        self.clock.now_s = max(self.clock.now_s, start_s)
        while self.pending and self.pending[0][0] <= self.step - self.pp_size:
            self._land(*self.pending.popleft())
        while self.arrivals and self.arrivals[0].arrival_s <= self.clock.now_s:
            self.queue.append(self.arrivals.popleft())
        own = self.own
        own.finished(self.gone)
        own.cohorts.begin_step(self.step, self.gone)
        self.gone = set()
        self.disturb()
        decision = own.decide(self._state())
        self.held = dict(decision.hold)
        for name in decision.hold:
            self.alive[name].holds.append(self.step)
        self._form(decision)

    def _state(self):
        own, ready = self.own, self.own.cohorts.ready
        backlog = sum(r.prompt - r.computed for r in self.queue)
        return PipelineState(
            step=self.step,
            now_s=self.clock.now_s,
            pp_size=self.pp_size,
            max_budget=self.chunk,
            min_budget=min(len(ready) + 1, self.chunk),
            decode_budget=len(ready),
            num_ready=len(ready),
            ready=Lazy(self._ready),
            in_flight=own.cohorts.in_flight,
            recent=own.cohorts.recent,
            parked=own.cohorts.parked_counts(),
            num_waiting=len(self.queue),
            waiting_tokens=backlog,
            totals=own.timer.totals,
        )

    def _ready(self, reverse):
        held, ready = self.own.cohorts.holds_in_a_row, self.own.cohorts.ready
        for name, r in reversed(self.alive.items()) if reverse else self.alive.items():
            if name in ready:
                context = r.prompt + r.tokens
                yield Decode(name, context, r.tokens, held.get(name, 0), r.last_s, r.first_s)

    def _form(self, decision):
        rows = [self.alive[name] for name in sorted(self.own.cohorts.ready)]
        context = sum(r.prompt + r.tokens for r in rows)
        room = max(decision.budget - len(rows), 0)
        prefills, ending = [], []
        while self.queue and room > 0:
            request = self.queue[0]
            new = min(room, request.prompt - request.computed)
            prefills.append((new, request.computed))
            request.computed += new
            room -= new
            if request.computed < request.prompt:
                break
            ending.append(self.queue.popleft())
            self.alive[request.name] = request
        for request in rows:
            request.longest_wait = max(request.longest_wait, self.step - request.ready_step)
        both = rows + ending
        self.sizes.append(len(rows))
        if not (both or prefills):
            return
        ended = {r.name for r in ending}
        names = {r.name for r in rows} | ended
        num_rows = len(rows) + len(prefills)
        shape = (len(rows) + sum(n for n, _ in prefills), tuple(prefills), len(rows), context)
        batch = MicroBatch(
            self.step, num_rows, len(rows), len(rows), context, tuple(prefills), len(both)
        )
        self.own.cohorts.scheduled(batch, names, ended, ended)
        self._through(self.stage(*shape))
        self.pending.append((self.step, both))

    def _through(self, seconds):
        at_s = self.clock.now_s
        for number, free_s in enumerate(self.free_s):
            at_s = self.free_s[number] = max(at_s, free_s) + seconds
        self.done_s[self.step] = at_s

    def _land(self, step, rows):
        at_s, decodes = self.clock.now_s, set()
        for request in rows:
            if request.gone:
                continue
            request.tokens += 1
            if request.tokens == 1:
                request.first_s = at_s
                self.own.timer.first_tokens({request.name: at_s - request.arrival_s}, at_s)
            else:
                decodes.add(request.name)
            request.last_s, request.ready_step = at_s, self.step
            if request.tokens >= request.output:
                self.drop(request)
        self.own.timer.decode_tokens(decodes, at_s)

    def drop(self, request):
        """It is done, or was aborted."""
        request.gone = True
        self.alive.pop(request.name, None)
        self.gone.add(request.name)
        self.ended.append(request)

    def preempt(self, request):
        """It loses its KV blocks and queues again, first in line; only while it is ready."""
        self.own.preempted(request.name, request.prompt + request.tokens, self.step)
        del self.alive[request.name]
        request.prompt, request.computed = request.prompt + request.tokens, 0
        request.output, request.tokens = request.output - request.tokens, 0
        self.queue.appendleft(request)

    def disturb(self):
        """What happens to requests before the step is decided; nothing here."""


def load(seed, rate, seconds, prompts=(20, 120), outputs=(100, 300)):
    """Poisson arrivals, uniform lengths."""
    rng, now_s, requests = random.Random(seed), 0.0, []
    while now_s < seconds:
        now_s += rng.expovariate(rate)
        prompt, output = rng.randint(*prompts), rng.randint(*outputs)
        requests.append(Served(f"r{len(requests)}", now_s, prompt, output))
    return requests
