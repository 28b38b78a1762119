"""The stand-in for a GPU's stream: a thread that works off micro-batches in order, by deadlines.

vLLM-free. The worker's own thread runs ahead of it, as it runs ahead of a GPU.
"""

import logging
import queue
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from bench.batch import BatchShape
from bench.wall_clock.handover import HandOver
from bench.wall_clock.timeline import StageTimeline, sleep_until

logger = logging.getLogger("vllm.wall_clock")


class StageFailedError(RuntimeError):
    """The stage's thread has ended; a neighbour is gone, or the profile gave a wrong time."""


@dataclass(slots=True)
class Work:
    """One micro-batch on a stage."""

    step: int
    shape: BatchShape
    submitted_s: float
    samples: bool
    feeds_on_tokens: bool
    done: threading.Event = field(default_factory=threading.Event)
    failed: bool = False

    def wait(self) -> None:
        """Returns when the stage is done with it. Raises StageFailedError."""
        self.done.wait()
        if self.failed:
            raise StageFailedError(f"step {self.step}: the stage failed, see its log")


class Device:
    """One stage. `token_lag` is the steps between sampling a token and feeding it on the device
    (Model Runner V2 with asynchronous scheduling over stages: the pipeline size), 0 where the
    host feeds it. `on_failure` is called on the stage's thread.
    """

    def __init__(
        self,
        index: int,
        num_stages: int,
        timeline: StageTimeline,
        hand_over: HandOver,
        token_lag: int = 0,
        on_failure: Callable[[], None] = lambda: None,
    ) -> None:
        self._is_first = index == 0
        self._is_last = index == num_stages - 1
        self._timeline = timeline
        self._hand_over = hand_over
        self._token_lag = token_lag
        self._sampled: deque[bool] = deque([False] * token_lag, maxlen=token_lag or None)
        self._on_failure = on_failure
        self._work: queue.SimpleQueue[Work | None] = queue.SimpleQueue()
        self._closing = False
        self._step = 0
        self._thread = threading.Thread(target=self._run, name="WallClockStage", daemon=True)
        self._thread.start()

    def submit(self, shape: BatchShape, submitted_s: float, samples: bool) -> Work:
        """Queue a micro-batch; an empty one takes no time but keeps its place among the steps."""
        work = Work(self._step, shape, submitted_s, samples, self._feeds_on_tokens(samples))
        self._step += 1
        self._work.put(work)
        return work

    def close(self) -> None:
        """End the thread; what is queued is not waited for."""
        self._closing = True
        self._work.put(None)

    def _feeds_on_tokens(self, samples: bool) -> bool:
        if not self._token_lag:
            return False
        feeds = self._sampled[0]
        self._sampled.append(samples)
        return feeds

    def _run(self) -> None:
        try:
            while (work := self._work.get()) is not None:
                try:
                    self._execute(work)
                except BaseException:
                    work.failed = True
                    raise
                finally:
                    work.done.set()
        except Exception:
            if self._closing:
                return
            logger.exception("A wall-clock stage failed.")
            self._on_failure()

    def _execute(self, work: Work) -> None:
        if not work.shape.num_tokens:
            self._tokens_s(work)  # sent to this step all the same
            return
        span = self._timeline.run(work.shape, self._ready_s(work))
        sleep_until(span.end_s)
        if not self._is_last:
            self._hand_over.send(work.step, span.arrives_s)
        elif work.samples and self._token_lag:
            self._hand_over.send_tokens(work.step, span.end_s)

    def _ready_s(self, work: Work) -> float:
        if not self._is_first:
            step, arrived_s = self._hand_over.receive()
            if step != work.step:
                raise StageFailedError(f"step {step} arrived where {work.step} was due")
            return arrived_s
        return max(work.submitted_s, self._tokens_s(work))

    def _tokens_s(self, work: Work) -> float:
        """When the tokens that this step feeds on were sampled; 0 where there are none."""
        if not (self._is_first and work.feeds_on_tokens):
            return 0.0
        step, sampled_s = self._hand_over.receive_tokens()
        if step != work.step - self._token_lag:
            raise StageFailedError(f"step {work.step} got the tokens of step {step}")
        return sampled_s
