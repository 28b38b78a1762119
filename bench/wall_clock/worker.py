"""A vLLM worker that spends a stage's time instead of computing: `--worker-cls`."""

import os
import time
from pathlib import Path
from typing import Any

import torch
from vllm.distributed.parallel_state import get_pp_group
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, AsyncModelRunnerOutput, ModelRunnerOutput
from vllm.v1.worker.gpu_worker import init_worker_distributed_environment
from vllm.v1.worker.worker_base import CompilationTimes, WorkerBase

from bench.latency import load_profile
from bench.pipeline import LINKS, Activations
from bench.stages import stage_time
from bench.wall_clock.device import Device, Work
from bench.wall_clock.handover import ProcessGroupHandOver
from bench.wall_clock.requests import Requests, StepRows
from bench.wall_clock.settings import WallClockSettings
from bench.wall_clock.timeline import StageTimeline
from bench.wall_clock.tokens import guided


class _Sampled(AsyncModelRunnerOutput):  # type: ignore[misc]
    """An answer that is there when its stage is done; another thread of the worker waits."""

    def __init__(self, work: Work, output: Any) -> None:
        self._work = work
        self._output = output

    def get_output(self) -> Any:
        """Blocks until then."""
        self._work.wait()
        return self._output


class Worker(WorkerBase):  # type: ignore[misc]
    """One pipeline stage. What vLLM tells workers at start is answered as a GPU would.

    Raises ValueError for what it does not stand in for: tensor parallelism, draft tokens, LoRA,
    pooling and multimodal models. Log-probabilities are not answered.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._settings = WallClockSettings.of(self.vllm_config.additional_config)
        self._check()
        self._device: Device
        self._requests: Requests
        self._pending: tuple[Work, StepRows] | None = None

    def _check(self) -> None:
        unsupported = {
            "tensor_parallel_size > 1": self.parallel_config.tensor_parallel_size > 1,
            "speculative decoding": self.speculative_config is not None,
            "LoRA": self.lora_config is not None,
            "pooling models": self.model_config.runner_type != "generate",
            "multimodal models": self.model_config.is_multimodal_model,
        }
        for name, asked in unsupported.items():
            if asked:
                raise ValueError(f"the wall-clock worker does not stand in for {name}")

    def init_device(self) -> None:
        """Joins the process groups of vLLM's stages, over gloo."""
        self.device = torch.device("cpu")
        torch.set_num_threads(1)
        self.parallel_config.disable_custom_all_reduce = True
        # As vLLM's CPU worker does: the name by which groups of this engine find each other.
        os.environ["VLLM_DIST_IDENT"] = Path(self.distributed_init_method).name.split(":")[-1]
        init_worker_distributed_environment(
            self.vllm_config, self.rank, self.distributed_init_method, self.local_rank, "gloo"
        )

    def load_model(self, *, load_dummy_weights: bool = False) -> None:
        """There are no weights: makes the stage that takes the time."""
        group = get_pp_group()
        index, num_stages = group.rank_in_group, group.world_size
        profile = load_profile(self._settings.profile)
        is_last = index == num_stages - 1
        timeline = StageTimeline(
            stage_time(profile, self._layers(num_stages), index, self._settings.overhead),
            None if is_last else LINKS[self._settings.link],
            None if is_last else Activations(profile.hidden_size),
        )
        scheduler = self.scheduler_config
        on_device = scheduler.async_scheduling and self.vllm_config.use_v2_model_runner
        self._requests = Requests(samples=is_last)
        self._device = Device(
            index,
            num_stages,
            timeline,
            ProcessGroupHandOver(group.cpu_group, group.ranks, index),
            token_lag=num_stages if on_device and num_stages > 1 else 0,
            # vLLM watches over its workers and ends the engine, as when a GPU fails.
            on_failure=lambda: os._exit(1),
        )

    def _layers(self, num_stages: int) -> list[int]:
        """Layers of every stage, as vLLM splits them."""
        from vllm.distributed.utils import get_pp_indices

        total = self.model_config.get_total_num_hidden_layers()
        borders = [get_pp_indices(total, index, num_stages) for index in range(num_stages)]
        return [end - start for start, end in borders]

    def get_kv_cache_spec(self) -> dict[str, Any]:
        """Full attention in every layer of this stage, of the model's own shape."""
        start, end = self.model_config.get_layers_start_end_indices(self.parallel_config)
        spec = FullAttentionSpec(
            block_size=self.cache_config.block_size,
            num_kv_heads=self.model_config.get_num_kv_heads(self.parallel_config),
            head_size=self.model_config.get_head_size(),
            dtype=self.model_config.dtype,
        )
        return {f"model.layers.{layer}.self_attn.attn": spec for layer in range(start, end)}

    def determine_available_memory(self) -> int:
        """Bytes of KV cache of the GPU that this stage stands for; none of it is allocated."""
        return self._settings.kv_cache_bytes

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        """Nothing is stored."""

    def update_max_model_len(self, max_model_len: int) -> None:
        """vLLM shortens contexts to what the KV cache holds."""
        self.model_config.max_model_len = max_model_len

    def compile_or_warm_up_model(self) -> CompilationTimes:
        """Nothing to compile."""
        return CompilationTimes(language_model=0.0, encoder=0.0)

    def get_supported_tasks(self) -> tuple[str, ...]:
        """Text generation."""
        return ("generate",)

    def reset_mm_cache(self) -> None:
        """No multimodal inputs."""

    def reset_encoder_cache(self) -> None:
        """No encoder."""

    def synchronize_device(self) -> None:
        """No device holds work that the host would have to wait for."""

    def execute_model(self, scheduler_output: Any) -> Any:
        """Queues the micro-batch on the stage; `sample_tokens` has its answer."""
        submitted_s = time.monotonic()
        rows = self._requests.step(scheduler_output)
        work = self._device.submit(rows.shape, submitted_s, bool(rows.sampled))
        if not rows.shape.num_tokens:
            return EMPTY_MODEL_RUNNER_OUTPUT
        self._pending = (work, rows)
        return None

    def sample_tokens(self, grammar_output: Any) -> Any:
        """The tokens of the micro-batch just queued, when the last stage is done with it."""
        if self._pending is None:
            return None
        (work, rows), self._pending = self._pending, None
        if not get_pp_group().is_last_rank:
            return None
        tokens = dict(rows.sampled)
        if grammar_output is not None:
            ids, bitmask = (
                grammar_output.structured_output_request_ids,
                grammar_output.grammar_bitmask,
            )
            tokens |= guided(ids, bitmask, tokens)
        output = ModelRunnerOutput(
            req_ids=list(rows.request_ids),
            req_id_to_index={rid: index for index, rid in enumerate(rows.request_ids)},
            sampled_token_ids=[[tokens[r]] if r in tokens else [] for r in rows.request_ids],
        )
        if self.scheduler_config.async_scheduling:
            return _Sampled(work, output)
        work.wait()
        return output

    def shutdown(self) -> None:
        """Ends the stage's thread."""
        if device := getattr(self, "_device", None):
            device.close()
