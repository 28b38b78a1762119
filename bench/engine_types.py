"""What goes into the engine in virtual time, what comes out of it, and what drives a scheduler."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from bench.batch import BatchShape


@dataclass(frozen=True, slots=True)
class RequestSpec:
    """A request as the client sends it. `prompt` is token ids, or only their number."""

    request_id: str
    arrival_s: float
    prompt: int | Sequence[int]
    max_tokens: int
    priority: int = 0
    lora_id: int = 0
    structured: bool = False
    abort_s: float | None = None


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What a `schedule()` result will do, read before anything moves on."""

    shape: BatchShape
    sampling: tuple[str, ...]  # requests that get a token from this step


class Adapter(Protocol):
    """How the engine drives a scheduler; `bench.vllm_harness.VllmAdapter` is the real one."""

    def queue_depth(self, scheduler: Any) -> int:
        """Batches in flight at most (`VllmConfig.max_concurrent_batches`)."""

    def token_lag(self, scheduler: Any) -> int:
        """Steps between sampling a token and feeding it on the device; 0 when the host does."""

    def add_request(self, scheduler: Any, spec: RequestSpec) -> None:
        """Make the request and hand it to the scheduler."""

    def abort(self, scheduler: Any, request_ids: Sequence[str]) -> None:
        """Abort; unknown or finished ids are ignored."""

    def counts(self, scheduler: Any) -> tuple[int, int]:
        """Requests running and waiting."""

    def plan(self, scheduler: Any, scheduler_output: Any) -> StepPlan:
        """Read a fresh `schedule()` result."""

    def grammar(self, scheduler: Any, scheduler_output: Any) -> Any:
        """What guides the sampling of structured rows, None when there are none."""

    def model_output(
        self, scheduler: Any, scheduler_output: Any, plan: StepPlan, grammar: Any
    ) -> Any:
        """What the model runner answers once the batch is through."""

    def collect(
        self, scheduler: Any, plan: StepPlan, outputs: Any
    ) -> list[tuple[str, list[int], bool]]:
        """Read what `update_from_output` gave: (request id, new tokens, finished) a row."""


@dataclass(frozen=True, slots=True)
class HostTime:
    """Seconds the engine's thread spends per step; the defaults cost nothing.

    `idle_s` is vLLM's own sleep after a turn that executed nothing while requests remain.
    """

    schedule_s: float = 0.0
    schedule_per_request_s: float = 0.0
    schedule_per_new_request_s: float = 0.0
    update_s: float = 0.0
    update_per_request_s: float = 0.0
    idle_s: float = 0.001


@dataclass(slots=True)
class ServedRequest:
    """What a client saw. Times are virtual seconds, None until they happen."""

    request_id: str
    arrival_s: float
    num_prompt_tokens: int
    first_token_s: float | None = None
    last_token_s: float | None = None
    num_tokens: int = 0
    finished: bool = False
    aborted: bool = False
    token_times_s: list[float] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)


@dataclass(slots=True)
class StepRecord:
    """One `schedule()` call. `done_s` is when the last stage had finished it."""

    step: int
    schedule_s: float
    done_s: float
    shape: BatchShape
    alive_decodes: int
    running: int
    waiting: int
    preemptions: int


@dataclass(slots=True)
class RunResult:
    """A whole run. `schedule_us` and `update_us` are real microseconds, all else is virtual."""

    requests: dict[str, ServedRequest]
    steps: list[StepRecord]
    end_s: float
    schedule_us: list[float]
    update_us: list[float]
