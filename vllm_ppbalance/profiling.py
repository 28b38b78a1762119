"""Measures the stages at start: real prompts of each size through the real pipeline.

The prompts are requests of our own inside the scheduler; their outputs never leave it.
"""

from __future__ import annotations

import logging
import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vllm_ppbalance.config import Settings
from vllm_ppbalance.controller import Controller
from vllm_ppbalance.deployment import deployment_of, guessed_model, kv_tokens, layer_split
from vllm_ppbalance.profile_fit import fit_cost_model
from vllm_ppbalance.profile_store import (
    DAY_S,
    ProfileRefusedError,
    ProfileStore,
    default_directory,
)
from vllm_ppbalance.sources import load_settings
from vllm_ppbalance.startup_profile import StartupProfile, own_request

logger = logging.getLogger("vllm.ppbalance")


class ProfileRun:
    """Runs a `StartupProfile` inside a scheduler until all is measured or a user's request comes.

    `hash_block` is the number of tokens under one prefix-cache hash.
    """

    def __init__(self, scheduler: Any, profile: StartupProfile, hash_block: int) -> None:
        self._scheduler = scheduler
        self._hash_block = hash_block
        self.profile = profile

    def feed(self, now_s: float | None) -> None:
        """Add what the profile asks for."""
        for request_id, tokens in self.profile.more(now_s):
            config = self._scheduler.vllm_config
            request = make_request(config, request_id, tokens, self._hash_block)
            self._scheduler.add_request(request)

    def stop(self, why: str) -> None:
        """Abort our requests: somebody else needs the engine."""
        from vllm.v1.request import RequestStatus

        left = self.profile.end(why)
        self._scheduler.finish_requests(left, RequestStatus.FINISHED_ABORTED)

    def collect(self, result: dict[int, Any]) -> None:
        """Take the rows of our requests out of what goes to the clients."""
        own = take_own_rows(result)
        if own:
            self.profile.finished(row.request_id for row in own if row.finish_reason)


def take_own_rows(result: dict[int, Any]) -> list[Any]:
    """The rows of our requests, which are then no longer among those for the clients."""
    taken: list[Any] = []
    for client in result.values():
        own = [row for row in client.outputs if own_request(row.request_id)]
        if own:
            client.outputs = [r for r in client.outputs if not own_request(r.request_id)]
            taken += own
        if client.finished_requests:
            client.finished_requests = {r for r in client.finished_requests if not own_request(r)}
    return taken


def abort_own_requests(scheduler: Any) -> None:
    """End what measuring has left behind: nobody takes their rows out any more."""
    from vllm.v1.request import RequestStatus

    own = [request_id for request_id in scheduler.requests if own_request(request_id)]
    scheduler.finish_requests(own, RequestStatus.FINISHED_ABORTED)


def make_request(vllm_config: Any, request_id: str, num_tokens: int, hash_block: int) -> Any:
    """A vLLM request of random tokens that ends with its first output token."""
    from vllm.sampling_params import SamplingParams
    from vllm.v1.request import Request

    model = vllm_config.model_config
    special = special_tokens(model.hf_config)
    vocabulary = model.get_vocab_size()
    plain = next(token for token in range(vocabulary) if token not in special)
    # Nothing may be found in the prefix cache, nor found there later by anybody.
    caching = vllm_config.cache_config.enable_prefix_caching
    tokens = random.Random(request_id).choices(range(vocabulary), k=num_tokens)
    tokens = [plain if token in special else token for token in tokens]
    return Request(
        request_id=request_id,
        prompt_token_ids=tokens,
        sampling_params=SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True),
        pooling_params=None,
        block_hasher=_random_hasher(hash_block) if caching else None,
    )


def special_tokens(hf_config: Any) -> set[int]:
    """Tokens that a model's configuration names.

    Some models look at the image behind each of their image tokens, and end the engine without one.
    """
    named = vars(hf_config).items()
    return {
        token
        for name, token in named
        if name.endswith(("_token_id", "_token_index")) and isinstance(token, int)
    }


def _random_hasher(block_size: int) -> Callable[[Any], list[bytes]]:
    def hashes(request: Any) -> list[bytes]:
        missing = request.num_tokens // block_size - len(request.block_hashes)
        return [os.urandom(32) for _ in range(missing)]

    return hashes


def why_not(vllm_config: Any) -> str | None:
    """Why this engine must not be given requests of ours, or None."""
    if vllm_config.parallel_config.data_parallel_size > 1:
        return "data parallel ranks must step together"
    if vllm_config.kv_transfer_config is not None:
        return "a KV connector would transfer the prompts"
    model = vllm_config.model_config
    if model.runner_type != "generate" or model.is_encoder_decoder:
        return "only decoder-only generation is measured"
    return None


def gpu_name() -> str:
    """The GPU as vLLM's platform names it, "unknown" where it does not."""
    from vllm.platforms import current_platform

    try:
        return str(current_platform.get_device_name())
    except Exception:  # a name must not stop a server
        return "unknown"


def store_of(vllm_config: Any, settings: Settings) -> ProfileStore:
    """Where this deployment's profile is kept."""
    import vllm

    directory = settings.profiling.directory
    deployment = deployment_of(
        vllm_config, gpu_name(), str(vllm.__version__), layer_split(os.environ)
    )
    folder = Path(directory) if directory else default_directory(os.environ)
    return ProfileStore(folder, deployment, settings.predictor)


def prepare(scheduler: Any, own: Controller, hash_block: int) -> ProfileRun | None:
    """Give the controller a cost model: saved, or guessed; a run that measures one, if it may.

    The run starts at once: its first requests wake the engine.
    """
    settings, config = own.settings, scheduler.vllm_config
    store = store_of(config, settings)
    try:
        if settings.profiling.mode == "always":
            raise ProfileRefusedError("a new one is asked for")
        own.use_model(store.load(settings.profiling.max_age_days * DAY_S), store)
        own.profile = f"the saved profile {store.path}"
        return None
    except ProfileRefusedError as refusal:
        reason = str(refusal)
    own.use_model(guessed_model(config, settings.predictor), store)
    forbidden = "profiling is off" if settings.profiling.mode == "off" else why_not(config)
    if forbidden:
        own.profile = f"no profile ({reason}); learnt from serving: {forbidden}"
        return None
    kv_share = int(kv_tokens(scheduler) * settings.profiling.max_kv_share)
    longest = min(scheduler.max_model_len - 1, kv_share)
    profile = StartupProfile(
        settings, own.pp_size, scheduler.max_num_scheduled_tokens, longest, kv_share
    )
    own.profile = f"no profile ({reason}); being measured"
    run = ProfileRun(scheduler, profile, hash_block)
    run.feed(None)
    return run


def finish(run: ProfileRun, own: Controller) -> None:
    """Fit the cost model to what was measured, if that is enough, and save it."""
    profile = run.profile
    if not profile.enough or own.saver is None:
        logger.info(
            "ppbalance: measuring ended after %d micro-batches (%s); learning from serving.",
            len(profile.points),
            profile.ended_by,
        )
        return
    try:
        model = fit_cost_model(profile.points, settings=own.settings.predictor)
    except ValueError as error:  # a few odd times, as when a request ends the measuring early
        logger.warning(
            "ppbalance: what was measured makes no model (%s); learning from serving.", error
        )
        return
    own.use_model(model, own.saver.store)
    own.saver.start()
    logger.info(
        "ppbalance: measured %d micro-batches (%s); profile in %s.",
        len(profile.points),
        profile.ended_by,
        own.saver.store.path,
    )


def profile_offline(arguments: list[str], limit_s: float) -> Path:
    """Start an engine with vLLM's own command-line `arguments`, measure it, stop it.

    Without pipeline parallelism the whole model is measured, as one stage. Returns the profile's
    file. Raises SettingsError before anything starts, TimeoutError after `limit_s` s of measuring.
    """
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser
    from vllm.v1.engine.llm_engine import LLMEngine

    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    engine_args = EngineArgs.from_cli_args(parser.parse_args(arguments))
    engine_args.scheduler_cls = "vllm_ppbalance.plugin.StageScheduler"
    own = (engine_args.additional_config or {}).get("ppbalance", {})
    own = {**own, "chunk": {"strategy": "spread", **own.get("chunk", {})}}
    own["profiling"] = {**own.get("profiling", {}), "mode": "always"}
    engine_args.additional_config = {**(engine_args.additional_config or {}), "ppbalance": own}
    settings = load_settings(engine_args.additional_config, os.environ).settings
    started_s = time.time()
    engine = LLMEngine.from_engine_args(engine_args)
    try:
        store = store_of(engine.vllm_config, settings)
        deadline_s = time.monotonic() + limit_s
        while not (store.path.exists() and store.path.stat().st_mtime >= started_s):
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"nothing was measured within {limit_s:g} s")
            time.sleep(0.2)
    finally:
        engine.engine_core.shutdown()
    return store.path
