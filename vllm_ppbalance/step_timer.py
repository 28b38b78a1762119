"""Pairs schedules with completions: TTFT, token gaps, and trustworthy stage times, in seconds."""

from collections import deque
from collections.abc import Iterable, Mapping, Set
from typing import Any, NamedTuple

from vllm_ppbalance.stage_times import StageTimes
from vllm_ppbalance.state import Decision, LatencyTotals, MicroBatch

SHAPE_TOKENS = 64  # micro-batches whose sizes differ by less count as one shape


class Step(NamedTuple):
    """What must be remembered of a schedule() until its output comes back."""

    output: Any  # the scheduler output itself, the only name a step has on its way back
    step: int
    decodes: Set[str]  # ids of rows that add a token to a running decode
    firsts: Set[str]  # ids whose prompt ends in this micro-batch
    batch: MicroBatch | None  # None for an empty one
    submitted_s: float
    decision: Decision | None = None  # None where none was needed
    measuring: bool = False  # prompts of our own: nobody waits for it


class StepTimer:
    """Running totals of latencies, and the stage time of each micro-batch that shows one.

    `tokens_on_device`: a micro-batch feeds on the tokens of the one pp_size steps before, straight
    from the last stage (Model Runner V2 with asynchronous scheduling), so it starts no sooner.
    """

    def __init__(self, pp_size: int, *, tokens_on_device: bool = False) -> None:
        self.totals = LatencyTotals()
        self.last_stage = (0.0, 0.0)  # of the last micro-batch: when it could start, its stage time
        self.first_token_s: dict[str, float] = {}
        self.last_token_s: dict[str, float] = {}
        self._pp_size = pp_size
        self._stage_times = StageTimes(pp_size)
        self._pending: deque[Step] = deque()
        self._tokens_on_device = tokens_on_device
        self._done: deque[tuple[int, float]] = deque(maxlen=pp_size)  # (step, when it came back)
        self._was_full = False
        self._shapes: set[tuple[bool, int]] = set()

    def scheduled(self, step: Step) -> None:
        """Remember a schedule(), empty ones too: outputs come back in the same order."""
        self._pending.append(step)

    def returned(self, output: Any) -> Step | None:
        """The step `output` belongs to; older ones, which can no longer return, are dropped."""
        while self._pending:
            step = self._pending.popleft()
            if step.output is output:
                return step
        return None

    def stage_s(self, step: Step, now_s: float) -> float | None:
        """Seconds the slowest stage took for a step that came back at `now_s`; None if unclear.

        Clear only while the pipeline was full before and after, with no empty micro-batch in
        between, and for a shape seen before: the first of its shape may hold one-time work.
        """
        batch = step.batch
        start_s = step.submitted_s
        if self._tokens_on_device and self._done and self._done[0][0] == step.step - self._pp_size:
            start_s = max(start_s, self._done[0][1])
        self._done.append((step.step, now_s))
        behind = sum(later.batch is not None for later in self._pending)
        was_full, self._was_full = self._was_full, behind >= self._pp_size - 1
        if batch is None:
            self._was_full = False
            return None
        seconds, _ = self._stage_times.completed(start_s, now_s)
        self.last_stage = start_s, seconds
        shape = (bool(batch.prefills), batch.num_tokens // SHAPE_TOKENS)
        seen = shape in self._shapes
        self._shapes.add(shape)
        clear = was_full and self._was_full and seen and seconds > 0.0
        return seconds if clear else None

    def first_tokens(self, ttfts_s: Mapping[str, float], now_s: float) -> None:
        """Count requests whose first token came out at `now_s`, with their TTFT."""
        for request_id in ttfts_s:
            self.first_token_s[request_id] = self.last_token_s[request_id] = now_s
        totals = self.totals
        self.totals = LatencyTotals(
            totals.ttft_s + sum(ttfts_s.values()),
            totals.first_tokens + len(ttfts_s),
            totals.gap_s,
            totals.gaps,
        )

    def decode_tokens(self, decodes: Set[str], now_s: float, tokens: int | None = None) -> None:
        """Count the gaps of decodes that came out at `now_s`.

        `tokens` is the number of tokens they produced when it is not one each (draft tokens).
        """
        last = self.last_token_s
        ids = last.keys() & decodes
        if not ids:
            return
        gap_s = len(ids) * now_s - sum(map(last.__getitem__, ids))
        last.update(dict.fromkeys(ids, now_s))
        totals = self.totals
        self.totals = LatencyTotals(
            totals.ttft_s,
            totals.first_tokens,
            totals.gap_s + gap_s,
            totals.gaps + (len(ids) if tokens is None else tokens),
        )

    def forget(self, finished: Iterable[str]) -> None:
        """Drop what is kept of finished requests."""
        for request_id in finished:
            self.first_token_s.pop(request_id, None)
            self.last_token_s.pop(request_id, None)
