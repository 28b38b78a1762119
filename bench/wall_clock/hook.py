"""The little of vLLM that must give way on a CPU for a pipeline of GPUs to be stood in for.

Only processes of `python -m bench.wall_clock.serve` do this, never the plugin.
"""

import functools
from typing import Any


def install() -> None:
    """Both of the below; needed in every process of a server."""
    _keep_async_scheduling()
    _wait_without_spinning()


def _keep_async_scheduling() -> None:
    """A CPU may schedule asynchronously, and in Model Runner V2's cadence, if it is asked to.

    vLLM's CPU platform turns the first off, since a CPU computes where its host thread runs, and
    the second wants Triton, for kernels that no wall-clock worker runs. A config is checked anew
    in the engine core's process, so setting its fields once is not enough.
    """
    from vllm.config import vllm as config_module
    from vllm.platforms.cpu import CpuPlatform

    config_module.HAS_TRITON = True
    original = CpuPlatform.check_and_update_config.__func__

    def check_and_update_config(cls: Any, vllm_config: Any) -> None:
        asked = vllm_config.scheduler_config.async_scheduling
        original(cls, vllm_config)
        vllm_config.scheduler_config.async_scheduling = asked

    CpuPlatform.check_and_update_config = classmethod(check_and_update_config)


def _wait_without_spinning() -> None:
    """Readers of vLLM's message queues sleep until they are notified.

    They spin for a second after each message otherwise: more processes than there are cores here,
    where on a GPU server each has a core of its own.
    """
    from vllm.distributed.device_communicators.shm_broadcast import SpinCondition

    original = SpinCondition.__init__

    @functools.wraps(original)
    def without_spinning(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        self.busy_loop_s = 0

    SpinCondition.__init__ = without_spinning
