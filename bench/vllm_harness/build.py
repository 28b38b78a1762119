"""vLLM's real schedulers without a model or a GPU: nothing is downloaded, nothing computed."""

import json
import tempfile
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import torch
from vllm import ModelRegistry
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    LoRAConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    SpeculativeConfig,
    VllmConfig,
)
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.structured_output import StructuredOutputManager

VOCABULARY = 512
EOS = 2
_CONFIG = {
    "architectures": ["HarnessForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 1 << 20,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": EOS,
}


class _HarnessModel(torch.nn.Module):  # type: ignore[misc]
    """Says what it supports and computes nothing.

    vLLM asks the model's class; for one of its own it starts a process that takes 20 s and more.
    """

    supports_pp = True
    supports_lora = True
    packed_modules_mapping: ClassVar[dict[str, list[str]]] = {}
    embedding_modules: ClassVar[dict[str, str]] = {}

    def __init__(self, vllm_config: Any, prefix: str = "") -> None:
        super().__init__()

    def _refuse(self, *_: Any, **__: Any) -> Any:
        """Stages in virtual time take a micro-batch's shape; nobody calls a model."""
        raise RuntimeError("the harness has no model to compute with: see bench.pipeline")

    # What vLLM looks for in a model's class.
    embed_input_ids = forward = compute_logits = make_empty_intermediate_tensors = _refuse


ModelRegistry.register_model("HarnessForCausalLM", _HarnessModel)


@cache
def model_dir(with_tokenizer: bool) -> "tempfile.TemporaryDirectory[str]":
    """A folder with config.json that lives as long as the process; a tokenizer if asked for."""
    folder = tempfile.TemporaryDirectory(prefix="vllm-harness-")
    path = Path(folder.name)
    (path / "config.json").write_text(json.dumps(_CONFIG))
    if with_tokenizer:
        from tokenizers import Tokenizer, decoders
        from tokenizers.models import WordLevel
        from transformers import PreTrainedTokenizerFast

        make: Any = PreTrainedTokenizerFast

        words = ["<unk>", "<bos>", "<eos>", *"abcdefgh"]
        words += [f"w{i}" for i in range(len(words), VOCABULARY)]
        vocabulary = {word: i for i, word in enumerate(words)}
        tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
        tokenizer.decoder = decoders.ByteLevel()  # tells xgrammar how to read the words
        make(
            tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<bos>", eos_token="<eos>"
        ).save_pretrained(path)
    return folder


@cache
def _with_runner(v2: bool) -> type[Any]:
    """VllmConfig with the model runner's version fixed: without a GPU vLLM would say V1."""
    fixed = property(lambda _self: v2)
    return type("HarnessVllmConfig", (VllmConfig,), {"use_v2_model_runner": fixed})


def build_scheduler(
    scheduler_cls: Callable[..., Any] | None = None,
    *,
    pp_size: int = 1,
    async_scheduling: bool = False,
    v2_model_runner: bool = False,
    max_num_seqs: int = 256,
    max_num_batched_tokens: int = 2048,
    max_model_len: int = 8192,
    block_size: int = 16,
    num_gpu_blocks: int = 1 << 16,
    prefix_caching: bool = False,
    policy: str = "fcfs",
    long_prefill_token_threshold: int = 0,
    num_draft_tokens: int = 0,
    max_loras: int = 0,
    structured_outputs: bool = False,
    additional_config: Mapping[str, Any] | None = None,
    log_stats: bool = False,
) -> Any:
    """A scheduler as `EngineCore` would build it; vLLM's own class when `scheduler_cls` is None.

    `num_draft_tokens` turns on n-gram speculation, `structured_outputs` real grammars (xgrammar).
    Bad values raise what vLLM raises for them.
    """
    model_config = ModelConfig(
        model=model_dir(structured_outputs).name,
        skip_tokenizer_init=not structured_outputs,
        dtype="bfloat16",
        max_model_len=max_model_len,
    )
    scheduler_config = SchedulerConfig(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=max_model_len,
        is_encoder_decoder=False,
        enable_chunked_prefill=True,
        policy=policy,
        long_prefill_token_threshold=long_prefill_token_threshold,
        async_scheduling=False,
    )
    parallel_config = ParallelConfig(
        pipeline_parallel_size=pp_size, distributed_executor_backend="mp"
    )
    vllm_config = VllmConfig(
        model_config=model_config,
        scheduler_config=scheduler_config,
        cache_config=CacheConfig(block_size=block_size, enable_prefix_caching=prefix_caching),
        parallel_config=parallel_config,
        device_config=DeviceConfig(device="cpu"),
        speculative_config=_speculation(num_draft_tokens, model_config, parallel_config),
        lora_config=LoRAConfig(max_loras=max_loras, max_lora_rank=8) if max_loras else None,
        additional_config=dict(additional_config or {}),
    )
    # Set after construction: on a CPU vLLM turns asynchronous scheduling off.
    vllm_config.scheduler_config.async_scheduling = async_scheduling
    vllm_config.cache_config.num_gpu_blocks = num_gpu_blocks
    vllm_config.__class__ = _with_runner(v2_model_runner)
    if scheduler_cls is None:
        scheduler_cls = AsyncScheduler if async_scheduling else Scheduler
    return scheduler_cls(
        vllm_config=vllm_config,
        kv_cache_config=_kv_cache_config(block_size, num_gpu_blocks),
        structured_output_manager=StructuredOutputManager(vllm_config),
        block_size=block_size,
        log_stats=log_stats,
    )


def _speculation(num_draft_tokens: int, model: Any, parallel: Any) -> Any:
    if not num_draft_tokens:
        return None
    return SpeculativeConfig(
        method="ngram",
        num_speculative_tokens=num_draft_tokens,
        prompt_lookup_min=1,
        prompt_lookup_max=3,
        target_model_config=model,
        target_parallel_config=parallel,
    )


def _kv_cache_config(block_size: int, num_blocks: int) -> Any:
    spec = FullAttentionSpec(
        block_size=block_size, num_kv_heads=2, head_size=16, dtype=torch.bfloat16
    )
    groups = [KVCacheGroupSpec(layer_names=["layer"], kv_cache_spec=spec)]
    return KVCacheConfig(num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=groups)
