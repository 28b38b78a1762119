"""Where the plugin meets vLLM: the entry point and `--scheduler-cls`."""

from __future__ import annotations

import functools
import importlib
import logging
import os
from collections.abc import Callable, Mapping
from typing import Any

from vllm_ppbalance import metrics_seam
from vllm_ppbalance.compatibility import incompatibility
from vllm_ppbalance.sources import (
    LoadedSettings,
    SettingsError,
    carry_to_ray_actors,
    flag,
    load_settings,
)

logger = logging.getLogger("vllm.ppbalance")

SCHEDULER_CLS = "vllm_ppbalance.Scheduler"


class Incompatible(RuntimeError):
    """The installed vLLM is not one we can schedule for, and PPBALANCE_STRICT=1 forbids less."""


def register() -> None:
    """Entry point of vLLM's general plugins; runs in every vLLM process, many times.

    Hooks the making of the engine's config: settings are checked before anything starts, and
    PPBALANCE=1 names our scheduler where the user named none.
    """
    try:
        EngineArgs: Any = importlib.import_module("vllm.engine.arg_utils").EngineArgs
        original = EngineArgs.create_engine_config
    except (ImportError, AttributeError) as error:  # vLLM would not start, with or without us
        logger.warning("ppbalance is off unless it is named by --scheduler-cls: %r.", error)
        return
    if not hasattr(original, "ppbalance"):
        wrapper = _checked(original)
        wrapper.ppbalance = True  # type: ignore[attr-defined]
        EngineArgs.create_engine_config = wrapper


def _checked(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        config = original(self, *args, **kwargs)
        try:
            _prepare(config)
        except (SettingsError, Incompatible) as error:
            if not _is_server(args, kwargs):
                raise
            # `vllm serve` gets one line instead of a traceback.
            raise SystemExit(f"ppbalance: {error}") from None
        except Exception:
            if strict():
                raise
            logger.exception("ppbalance cannot read the engine's config; vLLM starts all the same.")
        return config

    return create_engine_config


def _prepare(config: Any) -> None:
    scheduler_config = config.scheduler_config
    if scheduler_config.scheduler_cls is None and enabled(os.environ):
        scheduler_config.scheduler_cls = SCHEDULER_CLS
    if scheduler_config.scheduler_cls not in (SCHEDULER_CLS, Scheduler):
        return
    loaded = load_settings(_additional_config(config), os.environ)
    if getattr(config.parallel_config, "data_parallel_backend", "mp") == "ray":
        carry_to_ray_actors(os.environ)
    if loaded.settings.metrics and config.parallel_config.pipeline_parallel_size > 1:
        metrics_seam.install()  # this process may become an API server
    if strict() and (problem := incompatibility()):
        raise Incompatible(f"{problem} (PPBALANCE_STRICT=1)")


def strict() -> bool:
    """Whether PPBALANCE_STRICT=1 makes an unusable vLLM an error."""
    return flag("PPBALANCE_STRICT", os.environ)


def enabled(environ: Mapping[str, str]) -> bool:
    """Whether PPBALANCE asks for our scheduler. Raises SettingsError for an unclear value."""
    return flag("PPBALANCE", environ)


def _is_server(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    context = kwargs.get("usage_context", args[0] if args else None)
    return getattr(context, "name", "") == "OPENAI_API_SERVER"


def _additional_config(config: Any) -> dict[str, Any] | None:
    additional = config.additional_config
    return additional if isinstance(additional, dict) else None


class Scheduler:
    """For `--scheduler-cls vllm_ppbalance.Scheduler`.

    Makes an instance of vLLM's AsyncScheduler with asynchronous scheduling, else of its Scheduler,
    with our decisions in front. Without pipeline parallelism, for diffusion models, with torchrun's
    one scheduler a rank, or on a vLLM that lacks what we use, it makes vLLM's own scheduler. Raises
    SettingsError, and Incompatible when PPBALANCE_STRICT=1.
    """

    fewest_stages = 2

    def __new__(cls, vllm_config: Any, *args: Any, **kwargs: Any) -> Any:
        """The scheduler vLLM asked for, which is not an instance of this class."""
        stock = stock_scheduler_class(vllm_config)
        loaded = load_settings(_additional_config(vllm_config), os.environ)
        if not _usable(vllm_config, cls.fewest_stages):
            return stock(vllm_config, *args, **kwargs)
        from vllm_ppbalance.scheduler import balanced_class

        if loaded.settings.metrics:
            metrics_seam.install()
        scheduler = balanced_class(stock, loaded.settings)(vllm_config, *args, **kwargs)
        if not scheduler.ppbalance_failed:
            _log_start(scheduler.ppbalance, loaded)
        return scheduler


class StageScheduler(Scheduler):
    """The same over a single stage too: to measure one, or to look at our code on one GPU."""

    fewest_stages = 1


def stock_scheduler_class(vllm_config: Any) -> type:
    """The class vLLM would take if the user had named none."""
    name = "AsyncScheduler" if vllm_config.scheduler_config.async_scheduling else "Scheduler"
    if getattr(vllm_config, "diffusion_config", None) is not None:
        module = importlib.import_module("vllm.v1.core.sched.diffusion_scheduler")
        return getattr(module, f"Diffusion{name}")  # type: ignore[no-any-return]
    file = "async_scheduler" if name == "AsyncScheduler" else "scheduler"
    return getattr(importlib.import_module(f"vllm.v1.core.sched.{file}"), name)  # type: ignore[no-any-return]


def _usable(vllm_config: Any, fewest_stages: int) -> bool:
    if vllm_config.parallel_config.pipeline_parallel_size < fewest_stages:
        logger.info("ppbalance: pipeline_parallel_size is 1; vLLM's own scheduler is used.")
        return False
    problem = incompatibility()
    if getattr(vllm_config, "diffusion_config", None) is not None:
        problem = problem or "diffusion models have no decodes to balance"
    if vllm_config.parallel_config.distributed_executor_backend == "external_launcher":
        # Ours go by measured times, which differ: stages would wait for each other for ever.
        problem = problem or "with external_launcher the schedulers of all ranks must decide alike"
    if problem is None:
        return True
    if strict():
        raise Incompatible(f"{problem} (PPBALANCE_STRICT=1)")
    logger.warning("ppbalance is off, vLLM's own scheduler is used: %s.", problem)
    return False


def _log_start(own: Any, loaded: LoadedSettings) -> None:
    settings = loaded.settings
    logger.info(
        "ppbalance is active: chunk %s, rebalance %s, %d stages, SLO TTFT %g s TPOT %g s "
        "(settings from %s; stage times: %s).",
        settings.chunk.strategy,
        settings.rebalance.strategy,
        own.pp_size,
        settings.slo_ttft,
        settings.slo_tpot,
        ", ".join(loaded.named_sources()),
        own.profile,
    )
    for unused in loaded.without_effect():
        logger.warning("ppbalance: no effect: %s.", unused)
