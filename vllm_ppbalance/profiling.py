"""Measures the stages at start: real prompts of each size through the real pipeline.

The prompts are requests of our own inside the scheduler; their outputs never leave it.
"""

from __future__ import annotations

import logging
import os
import random
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

from vllm_ppbalance.config import Settings
from vllm_ppbalance.controller import Controller
from vllm_ppbalance.deployment import deployment_of, guessed_model, kv_tokens, layer_split
from vllm_ppbalance.profile_fit import Measured, fit_cost_model
from vllm_ppbalance.profile_store import (
    DAY_S,
    ProfileRefusedError,
    ProfileStore,
    default_directory,
)
from vllm_ppbalance.sources import load_settings
from vllm_ppbalance.state import MicroBatch

logger = logging.getLogger("vllm.ppbalance")

PREFIX = "ppbalance-profile-"
SMALL_SIZES = (16, 64)
# A GPU's tile shows as a step just past its multiples.
PAST_A_TILE = (128 + 16, 256 + 16, 384 + 16, 512 + 16)
LARGE_SIZES = (3072, 4096, 6144, 8192)
CHAIN_CHUNK, CHAIN_CHUNKS = 1024, 12  # long prompts in chunks: what a prefix costs
MIN_POINTS = 24


def sizes_to_measure(settings: Settings, largest: int) -> list[int]:
    """Micro-batch sizes worth knowing, in tokens, none above `largest`."""
    sizes = {*SMALL_SIZES, *PAST_A_TILE, *settings.chunk.candidates(), *LARGE_SIZES, largest}
    return sorted(size for size in sizes if size <= largest)


class StartupProfile:
    """One run of measurements: hands out prompts and budgets, collects stage times.

    All in tokens: `largest` is the largest micro-batch, `prompt_limit` the longest prompt the model
    takes, `kv_tokens` the part of the KV cache that may be used.
    """

    def __init__(
        self, settings: Settings, pp_size: int, largest: int, prompt_limit: int, kv_tokens: int
    ) -> None:
        self._settings = settings.profiling
        self._pp_size = pp_size
        self._kv_tokens = kv_tokens
        sizes = sizes_to_measure(settings, min(largest, prompt_limit, kv_tokens // pp_size))
        self._plans = self._make_plans(sizes, min(prompt_limit, kv_tokens // 2), largest)
        self._names = count()
        self._outstanding: set[str] = set()
        self._prompts: list[int] = []  # lengths still to hand out for this budget
        self._skip = 0
        self._started_s: float | None = None
        self.budget = 1
        self.points: list[Measured] = []
        self.done = not sizes
        self.ended_by = ""

    def _make_plans(
        self, sizes: list[int], longest: int, largest: int
    ) -> Iterator[tuple[int, list[int]]]:
        """(budget, prompt lengths) of each stretch; small ones first, so that a cut costs least."""
        prompts = self._settings.warmups + self._settings.repeats + 2 * (self._pp_size - 1)
        for size in sizes:
            yield size, [size] * prompts
        chunk = min(CHAIN_CHUNK, largest)
        chain = min(CHAIN_CHUNKS * chunk, longest) // chunk
        if chain >= 2:
            yield chunk, [chain * chunk] * 2

    def more(self, now_s: float | None) -> list[tuple[str, int]]:
        """Prompts to add now, as (request id, tokens): none while enough are in flight.

        The time allowed begins with the first `now_s` given.
        """
        if self.done:
            return []
        if now_s is not None:
            self._started_s = now_s if self._started_s is None else self._started_s
            if now_s - self._started_s > self._settings.max_seconds:
                self.done, self.ended_by = True, f"{self._settings.max_seconds:g} s are over"
                return []
        if not self._prompts and not self._outstanding and not self._next_plan():
            return []
        room = max(1, self._kv_tokens // max(self._prompts, default=1))
        new = []
        while self._prompts and len(self._outstanding) < room:
            name = f"{PREFIX}{next(self._names)}"
            new.append((name, self._prompts.pop()))
            self._outstanding.add(name)
        return new

    def _next_plan(self) -> bool:
        plan = next(self._plans, None)
        if plan is None:
            self.end("all sizes are measured")
            return False
        self.budget, self._prompts = plan
        self._skip = self._settings.warmups
        return True

    def end(self, why: str) -> list[str]:
        """Stop for good; returns the requests to abort."""
        self.done, self.ended_by = True, why
        outstanding, self._outstanding = sorted(self._outstanding), set()
        return outstanding

    def finished(self, request_ids: Iterable[str]) -> None:
        """Note that requests of ours are through."""
        self._outstanding.difference_update(request_ids)

    def measured(self, batch: MicroBatch, seconds: float) -> None:
        """Take a stage time, unless it still warms up."""
        if self.done or batch.num_decodes or batch.num_tokens != self.budget:
            return
        if self._skip > 0:
            self._skip -= 1
            return
        shape = (batch.num_tokens, batch.prefills, 0, 0)
        self.points.append(Measured(*shape, seconds))

    @property
    def enough(self) -> bool:
        """Whether there is something to fit."""
        return len(self.points) >= MIN_POINTS


def own_request(request_id: str) -> bool:
    """Whether a request is one of ours."""
    return request_id.startswith(PREFIX)


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
        for client in result.values():
            own = [row for row in client.outputs if own_request(row.request_id)]
            if own:
                client.outputs = [r for r in client.outputs if not own_request(r.request_id)]
                self.profile.finished(row.request_id for row in own if row.finish_reason)
            if client.finished_requests:
                theirs = {r for r in client.finished_requests if not own_request(r)}
                client.finished_requests = theirs


def make_request(vllm_config: Any, request_id: str, num_tokens: int, hash_block: int) -> Any:
    """A vLLM request of random tokens that ends with its first output token."""
    from vllm.sampling_params import SamplingParams
    from vllm.v1.request import Request

    vocabulary = vllm_config.model_config.get_vocab_size()
    # Nothing may be found in the prefix cache, nor found there later by anybody.
    caching = vllm_config.cache_config.enable_prefix_caching
    tokens = random.Random(request_id).choices(range(vocabulary), k=num_tokens)
    return Request(
        request_id=request_id,
        prompt_token_ids=tokens,
        sampling_params=SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True),
        pooling_params=None,
        block_hasher=_random_hasher(hash_block) if caching else None,
    )


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
    return ProfileStore(Path(directory) if directory else default_directory(os.environ), deployment)


def prepare(scheduler: Any, own: Controller, hash_block: int) -> ProfileRun | None:
    """Give the controller a cost model: saved, or guessed; a run that measures one, if it may.

    The run starts at once: its first requests wake the engine.
    """
    settings, config = own.settings, scheduler.vllm_config
    store = store_of(config, settings)
    try:
        own.use_model(store.load(settings.profiling.max_age_days * DAY_S), store)
        if settings.profiling.mode != "always":
            logger.info("ppbalance: stage times from the saved profile %s.", store.path)
            return None
        reason = "a new one is asked for"
    except ProfileRefusedError as refusal:
        reason = str(refusal)
    own.use_model(guessed_model(config), store)
    forbidden = "profiling is off" if settings.profiling.mode == "off" else why_not(config)
    if forbidden:
        logger.info("ppbalance: no profile (%s); learning from serving: %s.", reason, forbidden)
        return None
    kv_share = int(kv_tokens(scheduler) * settings.profiling.max_kv_share)
    longest = min(scheduler.max_model_len - 1, kv_share)
    profile = StartupProfile(
        settings, own.pp_size, scheduler.max_num_scheduled_tokens, longest, kv_share
    )
    logger.info("ppbalance: no profile (%s); measuring this deployment.", reason)
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
    own.use_model(fit_cost_model(profile.points), own.saver.store)
    own.saver.start()
    logger.info(
        "ppbalance: measured %d micro-batches (%s); profile in %s.",
        len(profile.points),
        profile.ended_by,
        own.saver.store.path,
    )


def profile_offline(arguments: list[str], limit_s: float) -> Path:
    """Start an engine with vLLM's own command-line `arguments`, measure it, stop it.

    Returns the profile's file. Raises TimeoutError after `limit_s` seconds of measuring.
    """
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser
    from vllm.v1.engine.llm_engine import LLMEngine

    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    engine_args = EngineArgs.from_cli_args(parser.parse_args(arguments))
    engine_args.scheduler_cls = "vllm_ppbalance.Scheduler"
    own = (engine_args.additional_config or {}).get("ppbalance", {})
    own = {**own, "chunk": {"strategy": "spread", **own.get("chunk", {})}}
    own["profiling"] = {**own.get("profiling", {}), "mode": "always"}
    engine_args.additional_config = {**(engine_args.additional_config or {}), "ppbalance": own}
    started_s = time.time()
    engine = LLMEngine.from_engine_args(engine_args)
    try:
        settings = load_settings(engine_args.additional_config, os.environ).settings
        store = store_of(engine.vllm_config, settings)
        deadline_s = time.monotonic() + limit_s
        while not (store.path.exists() and store.path.stat().st_mtime >= started_s):
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"nothing was measured within {limit_s:g} s")
            time.sleep(0.2)
    finally:
        engine.engine_core.shutdown()
    return store.path
