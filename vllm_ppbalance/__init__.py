"""Adaptive scheduling for vLLM's pipeline-parallel mode.

Importing this package imports neither vllm nor torch: `Scheduler` is resolved on first use.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm_ppbalance.plugin import Scheduler

__all__ = ["Scheduler", "__version__"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name == "Scheduler":
        from vllm_ppbalance.plugin import Scheduler

        return Scheduler
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
