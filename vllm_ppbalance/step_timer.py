"""Pairs schedules with completions: TTFT and token gaps as the scheduler sees them, in seconds."""

from collections import deque
from collections.abc import Iterable, Mapping, Set
from typing import Any, NamedTuple

from vllm_ppbalance.state import LatencyTotals


class Step(NamedTuple):
    """What must be remembered of a schedule() until its output comes back."""

    output: Any  # the scheduler output itself, the only name a step has on its way back
    step: int
    decodes: Set[str]  # ids of rows that add a token to a running decode
    firsts: Set[str]  # ids whose prompt ends in this micro-batch


class StepTimer:
    """Running totals of time to first token and of the gaps between tokens."""

    def __init__(self) -> None:
        self.totals = LatencyTotals()
        self.last_token_s: dict[str, float] = {}
        self._pending: deque[Step] = deque()

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

    def first_tokens(self, ttfts_s: Mapping[str, float], now_s: float) -> None:
        """Count requests whose first token came out at `now_s`, with their TTFT."""
        for request_id in ttfts_s:
            self.last_token_s[request_id] = now_s
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
            self.last_token_s.pop(request_id, None)
