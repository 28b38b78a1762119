"""Which prompts to send through an idle pipeline at start, and what their stage times say.

vLLM-free; `profiling.py` runs it inside a scheduler.
"""

from collections.abc import Iterable, Iterator
from itertools import count

from vllm_ppbalance.config import Settings
from vllm_ppbalance.profile_fit import Measured
from vllm_ppbalance.state import MicroBatch

PREFIX = "ppbalance-profile-"
SMALL_SIZES = (16, 64)
# A GPU's tile shows as a step just past its multiples.
PAST_A_TILE = (128 + 16, 256 + 16, 384 + 16, 512 + 16)
LARGE_SIZES = (3072, 4096, 6144, 8192)
# Long prompts in chunks: what a prefix costs. Shorter chunks where the model's context is short;
# smaller ones too, which tell what each token of the prefix costs once from what it costs each new
# token.
CHAIN_CHUNK, CHAIN_CHUNKS, CHAIN_ALIGN = 1024, 12, 128
SMALLER = 4
MIN_POINTS = 24


def sizes_to_measure(settings: Settings, largest: int) -> list[int]:
    """Micro-batch sizes worth knowing, in tokens, none above `largest`."""
    sizes = {*SMALL_SIZES, *PAST_A_TILE, *settings.chunk.candidates(), *LARGE_SIZES, largest}
    return sorted(size for size in sizes if 1 <= size <= largest)


class StartupProfile:
    """One run of measurements: hands out prompts and budgets, collects stage times.

    All in tokens: `largest` is the largest micro-batch, `prompt_limit` the longest prompt the model
    takes, `kv_tokens` the part of the KV cache that may be used.
    """

    def __init__(
        self, settings: Settings, pp_size: int, largest: int, prompt_limit: int, kv_tokens: int
    ) -> None:
        self._settings = settings.profiling
        self._pp_size = pp_size
        self._kv_tokens = kv_tokens
        sizes = sizes_to_measure(settings, min(largest, prompt_limit, kv_tokens // pp_size))
        self._plans = self._make_plans(sizes, min(prompt_limit, kv_tokens // 2), largest)
        self._names = count()
        self._outstanding: set[str] = set()
        self._prompts: list[int] = []  # lengths still to hand out for this budget
        self._skip = 0
        self._started_s: float | None = None
        self.budget = 1
        self.points: list[Measured] = []
        self.done = not sizes
        self.ended_by = ""

    def _make_plans(
        self, sizes: list[int], longest: int, largest: int
    ) -> Iterator[tuple[int, list[int]]]:
        """(budget, prompt lengths) of each stretch; small ones first, so that a cut costs least.

        The long prompts in chunks come before larger micro-batches: without them nothing is known
        of prefixes, and with many stages the time does not suffice for all sizes.
        """
        prompts = self._settings.warmups + self._settings.repeats + 2 * (self._pp_size - 1)
        short = max(longest // CHAIN_CHUNKS // CHAIN_ALIGN * CHAIN_ALIGN, CHAIN_ALIGN)
        chunk = min(CHAIN_CHUNK, largest, short)
        yield from ((size, [size] * prompts) for size in sizes if size <= chunk)
        chain = min(CHAIN_CHUNKS * chunk, longest) // chunk
        if chain >= 2:
            # Each prefix once in a full pipeline; the first two show no clear stage time.
            unclear = self._settings.warmups + 2 + self._pp_size
            yield chunk, [chain * chunk] * max(2, -(-(chain + unclear) // chain))
            if chunk >= SMALLER * CHAIN_ALIGN:
                yield chunk // SMALLER, [chain * chunk] * 2
        yield from ((size, [size] * prompts) for size in sizes if size > chunk)

    def more(self, now_s: float | None) -> list[tuple[str, int]]:
        """Prompts to add now, as (request id, tokens): none while enough are in flight.

        The time allowed begins with the first `now_s` given.
        """
        if self.done:
            return []
        if now_s is not None:
            self._started_s = now_s if self._started_s is None else self._started_s
            if now_s - self._started_s > self._settings.max_seconds:
                self.done, self.ended_by = True, f"{self._settings.max_seconds:g} s are over"
                return []
        if not self._prompts and not self._outstanding and not self._next_plan():
            return []
        room = max(1, self._kv_tokens // max(self._prompts, default=1))
        new = []
        while self._prompts and len(self._outstanding) < room:
            name = f"{PREFIX}{next(self._names)}"
            new.append((name, self._prompts.pop()))
            self._outstanding.add(name)
        return new

    def _next_plan(self) -> bool:
        plan = next(self._plans, None)
        if plan is None:
            self.end("all sizes are measured")
            return False
        self.budget, self._prompts = plan
        self._skip = self._settings.warmups
        return True

    def end(self, why: str) -> list[str]:
        """Stop for good; returns the requests to abort."""
        self.done, self.ended_by = True, why
        outstanding, self._outstanding = sorted(self._outstanding), set()
        return outstanding

    def finished(self, request_ids: Iterable[str]) -> None:
        """Note that requests of ours are through."""
        self._outstanding.difference_update(request_ids)

    def measured(self, batch: MicroBatch, seconds: float) -> None:
        """Take a stage time, unless it still warms up."""
        if self.done or batch.num_decodes or batch.num_tokens != self.budget:
            return
        if self._skip > 0:
            self._skip -= 1
            return
        shape = (batch.num_tokens, batch.prefills, 0, 0)
        self.points.append(Measured(*shape, seconds))

    @property
    def enough(self) -> bool:
        """Whether there is something to fit."""
        return len(self.points) >= MIN_POINTS


def own_request(request_id: str) -> bool:
    """Whether a request is one of ours."""
    return request_id.startswith(PREFIX)
