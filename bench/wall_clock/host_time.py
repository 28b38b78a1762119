"""Host time of this machine beyond a GPU server's, from requests beside no other load. vLLM-free.

With synchronous scheduling a request's round waits for the host once: from the last stage's end
until the first stage has the next micro-batch. Requests alone show the least it takes, a full
pipeline what it takes when the server's processes share few cores. Sixteen requests in one
micro-batch do not show more than one: it is a time a round, not a time a request. All are requests
of its own, so that a comparison of another load does not fit its own answer.
"""

from collections.abc import Callable
from dataclasses import dataclass

from bench.sim_spec import HostModel
from bench.workloads import BenchRequest

ALONE_TOKENS, OUTPUT_TOKENS = 64, 48
NUM_ALONE, APART_S = 6, 20.0  # further apart than any takes
MOST = 3.0  # times what shows alone
SEARCH_STEPS = 7  # to 2 % of what shows alone


@dataclass(frozen=True, slots=True)
class TokenGaps:
    """Mean seconds from a request's token to its next one: alone, and in a full pipeline."""

    alone_s: float
    full_s: float


def alone() -> list[BenchRequest]:
    """Requests to be sent one after the other, each when the one before is done."""
    return [
        BenchRequest(f"alone-{i}", APART_S * i, ALONE_TOKENS, OUTPUT_TOKENS)
        for i in range(NUM_ALONE)
    ]


def full(pp_size: int, budget: int) -> list[BenchRequest]:
    """Requests at once, whose prompts fill a micro-batch each: so each stays in one of its own."""
    return [BenchRequest(f"full-{i}", 0.0, budget, OUTPUT_TOKENS) for i in range(pp_size)]


def extra_time(measured: TokenGaps, virtual: Callable[[float], TokenGaps]) -> float:
    """Seconds a round with which `virtual` has the gaps measured; 0 where nothing shows.

    `virtual` takes them. With asynchronous scheduling the stages work meanwhile: nothing shows.
    """
    least_s = max(0.0, measured.alone_s - virtual(0.0).alone_s)
    if not least_s:
        return 0.0
    low_s, high_s = least_s, MOST * least_s
    for _ in range(SEARCH_STEPS):
        middle_s = (low_s + high_s) / 2.0
        if virtual(middle_s).full_s < measured.full_s:
            low_s = middle_s
        else:
            high_s = middle_s
    return low_s


def slower(host: HostModel, extra_s: float) -> HostModel:
    """The host with `extra_s` more between each completion and the next schedule()."""
    return HostModel.model_validate(host.model_dump() | {"update_s": host.update_s + extra_s})
