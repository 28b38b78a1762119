"""What a profile belongs to, and a first guess of stage times, both read off vLLM's config."""

from collections.abc import Mapping
from typing import Any

from vllm_ppbalance.config import PredictorSettings
from vllm_ppbalance.cost_model import CostModel
from vllm_ppbalance.roofline import roofline

# Guesses for a server GPU without NVLink; what is measured corrects them within tens of steps.
GUESSED_FLOPS = 100e12  # floating-point operations a second, dense 16-bit
GUESSED_BYTES_S = 0.7e12
GUESSED_OVERHEAD_S = 2e-3  # launches and host work of a micro-batch


def deployment_of(vllm_config: Any, gpu: str, version: str, layer_split: str) -> dict[str, Any]:
    """All that a measured stage time depends on, as plain values by name."""
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    return {
        "model": str(model.model),
        "dtype": str(model.dtype),
        "quantization": str(model.quantization),
        "kv_cache_dtype": str(vllm_config.cache_config.cache_dtype),
        "gpu": gpu,
        "pipeline_parallel_size": parallel.pipeline_parallel_size,
        "tensor_parallel_size": parallel.tensor_parallel_size,
        # What shards or repeats the layers; the latter two as far as this vLLM knows them.
        "data_parallel_size": parallel.data_parallel_size,
        "expert_parallel": bool(getattr(parallel, "enable_expert_parallel", False)),
        "decode_context_parallel_size": getattr(parallel, "decode_context_parallel_size", 1),
        "layer_split": layer_split,
        "vllm": version,
        "graph_mode": str(vllm_config.compilation_config.cudagraph_mode),
        "enforce_eager": bool(model.enforce_eager),
        "async_scheduling": bool(vllm_config.scheduler_config.async_scheduling),
        "max_num_batched_tokens": vllm_config.scheduler_config.max_num_batched_tokens,
    }


def guessed_model(vllm_config: Any, settings: PredictorSettings) -> CostModel:
    """A roofline over the model's shape, to start from where nothing was measured."""
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    config = model.hf_text_config
    hidden = int(config.hidden_size)
    heads = _number(config, "num_attention_heads") or 1
    head = _number(config, "head_dim") or hidden // heads
    kv_heads = _number(config, "num_key_value_heads") or heads
    inner = _number(config, "intermediate_size") or 4 * hidden
    layers = -(-int(config.num_hidden_layers) // parallel.pipeline_parallel_size)
    shards = parallel.tensor_parallel_size
    attention = hidden * head * (2 * heads + 2 * kv_heads)
    weights = layers * (attention + 3 * hidden * inner * _experts_a_token(config)) / shards
    return roofline(
        weights,
        GUESSED_FLOPS,
        GUESSED_BYTES_S,
        kv_bytes_per_token=layers * 2 * kv_heads * head * 2.0 / shards,
        attention_flops_per_pair=4.0 * head * heads * layers / shards,
        overhead_s=GUESSED_OVERHEAD_S,
        settings=settings,
    )


def _number(config: Any, name: str) -> int:
    """The value, its largest where each layer or kind of expert has its own; 0 where unset."""
    value = getattr(config, name, None) or 0
    return int(max(value) if isinstance(value, list | tuple) else value)


def _experts_a_token(config: Any) -> float:
    inner, chosen = _number(config, "moe_intermediate_size"), _number(config, "num_experts_per_tok")
    if not chosen:
        return 1.0
    dense = _number(config, "intermediate_size")
    return float(chosen) * (inner / dense if inner and dense else 1.0)


def kv_tokens(scheduler: Any) -> int:
    """Tokens the KV cache holds."""
    blocks: int = scheduler.cache_config.num_gpu_blocks
    return blocks * int(scheduler.cache_config.block_size)


def layer_split(environ: Mapping[str, str]) -> str:
    """Layers a stage as the user set them, "even" otherwise."""
    return environ.get("VLLM_PP_LAYER_PARTITION") or "even"
