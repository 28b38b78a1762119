"""Host time of this machine beyond a GPU server's, from requests that are alone. vLLM-free.

With synchronous scheduling a request's round waits for the host once: from the last stage's end
until the first stage has the next micro-batch. A request alone shows how long, and sixteen in one
micro-batch do not show more: so it is a time a round, not a time a request. It is found with
requests of its own, so that a comparison of another load does not fit its own answer.
"""

from bench.sim_spec import HostModel
from bench.workloads import BenchRequest

PROMPT_TOKENS, OUTPUT_TOKENS = 64, 48
NUM_ALONE, APART_S = 6, 20.0  # further apart than any takes


def alone() -> list[BenchRequest]:
    """Requests to be sent one after the other, each when the one before is done."""
    return [
        BenchRequest(f"alone-{i}", APART_S * i, PROMPT_TOKENS, OUTPUT_TOKENS)
        for i in range(NUM_ALONE)
    ]


def extra_time(measured_s: float, virtual_s: float) -> float:
    """Seconds a round from the mean token gaps of `alone()`, measured and with a GPU server's host.

    0 where nothing shows: with asynchronous scheduling the stages work meanwhile.
    """
    return max(0.0, measured_s - virtual_s)


def slower(host: HostModel, extra_s: float) -> HostModel:
    """The host with `extra_s` more between each completion and the next schedule()."""
    return HostModel.model_validate(host.model_dump() | {"update_s": host.update_s + extra_s})
