"""How our metrics get from the engine core to vLLM's `/metrics` page.

vLLM sends its `SchedulerStats` from each engine core to one of its API servers, also over data
parallel ranks and machines. `install` gives that dataclass one more field, which msgspec then
carries, and lets vLLM's Prometheus logger show it. A process without the field ignores it.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import logging
from collections.abc import Callable
from typing import Any

from vllm_ppbalance.metrics_page import shared_page

logger = logging.getLogger("vllm.ppbalance")

FIELD = "ppbalance"


def install() -> bool:
    """Open the way in this process; False, with one warning, on a vLLM that has none.

    Call it before vLLM makes its decoders. Safe to call again.
    """
    try:
        _add_field(importlib.import_module("vllm.v1.metrics.stats").SchedulerStats)
        _show_in(importlib.import_module("vllm.v1.metrics.loggers").PrometheusStatLogger)
    except Exception as error:
        _warn(f"{error!r}")
        return False
    return True


@functools.cache
def _warn(problem: str) -> None:
    logger.warning("ppbalance: no metrics on vLLM's page: %s. Serving goes on.", problem)


def _add_field(stats: Any) -> None:
    if not dataclasses.is_dataclass(stats):
        raise TypeError(f"{stats!r} is not a dataclass")
    fields: dict[str, Any] = stats.__dataclass_fields__
    if FIELD in fields:
        return
    # Made by `dataclass` itself, so that it is complete; outside __init__, so that nothing that
    # makes or copies statistics changes.
    no_init: Any = dataclasses.field(default=None, init=False, repr=False, compare=False)
    made: Any = dataclasses.make_dataclass("_Made", [(FIELD, "dict | None", no_init)])
    stats.__annotations__[FIELD] = dict | None
    setattr(stats, FIELD, None)
    fields[FIELD] = made.__dataclass_fields__[FIELD]


def _show_in(stat_logger: Any) -> None:
    original: Callable[..., None] = stat_logger.record
    if getattr(original, FIELD, False):
        return

    @functools.wraps(original)
    def record(self: Any, scheduler_stats: Any = None, *args: Any, **kwargs: Any) -> None:
        original(self, scheduler_stats, *args, **kwargs)
        payload = getattr(scheduler_stats, FIELD, None)
        if payload:
            engine = kwargs.get("engine_idx", args[2] if len(args) > 2 else 0)
            _show(self.vllm_config, engine, payload)

    setattr(record, FIELD, True)
    stat_logger.record = record


def _show(vllm_config: Any, engine: int, payload: Any) -> None:
    """What fails here must not end vLLM's output loop."""
    try:
        model_name = vllm_config.model_config.served_model_name
        shared_page().update(str(model_name), str(engine), payload)
    except Exception as error:
        _warn(f"{error!r}")
