"""Messages between stages, over the process group that vLLM's pipeline stages use."""

from collections import deque
from typing import Any, Protocol

import torch
import torch.distributed as dist

UNSENT_LIMIT = 64  # as deep as any batch queue: a receiver further behind is waited for


class HandOver(Protocol):
    """How a stage hears of the one before it and tells the next."""

    def receive(self) -> tuple[int, float]:
        """Step and time of arrival of the activations from the stage before; blocks."""

    def send(self, step: int, arrives_s: float) -> None:
        """Tell the next stage."""

    def receive_tokens(self) -> tuple[int, float]:
        """Step and time at which the last stage had sampled; blocks."""

    def send_tokens(self, step: int, sampled_s: float) -> None:
        """Tell the first stage that this one, the last, has sampled."""


class ProcessGroupHandOver:
    """Two numbers a message, [step, seconds on the machine's monotonic clock], through gloo.

    `ranks` are the global ranks of the stages in order; `group` is a CPU group that holds them.
    Receiving raises RuntimeError when the sender has gone.
    """

    def __init__(self, group: Any, ranks: list[int], index: int) -> None:
        self._group = group
        self._ranks = ranks
        self._index = index
        self._unsent: deque[tuple[Any, torch.Tensor]] = deque()

    def receive(self) -> tuple[int, float]:
        """From the stage before."""
        return self._receive(self._ranks[self._index - 1])

    def send(self, step: int, arrives_s: float) -> None:
        """To the stage after."""
        self._send(self._ranks[self._index + 1], step, arrives_s)

    def receive_tokens(self) -> tuple[int, float]:
        """From the last stage."""
        return self._receive(self._ranks[-1])

    def send_tokens(self, step: int, sampled_s: float) -> None:
        """To the first stage."""
        self._send(self._ranks[0], step, sampled_s)

    def _receive(self, source: int) -> tuple[int, float]:
        message = torch.empty(2, dtype=torch.float64)
        dist.recv(message, src=source, group=self._group)
        step, seconds = message.tolist()
        return int(step), seconds

    def _send(self, target: int, step: int, seconds: float) -> None:
        # Not awaited: gloo ends a send only when the receiver asks for it.
        message = torch.tensor([step, seconds], dtype=torch.float64)
        self._unsent.append((dist.isend(message, dst=target, group=self._group), message))
        while self._unsent and (
            len(self._unsent) > UNSENT_LIMIT or self._unsent[0][0].is_completed()
        ):
            self._unsent.popleft()[0].wait()
