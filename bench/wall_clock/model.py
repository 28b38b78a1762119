"""A model folder with a profile's shape and a byte-level tokenizer, but no weights."""

import json
from pathlib import Path
from typing import Any

from bench.byte_tokenizer import SPECIAL_TOKENS, write_tokenizer
from bench.latency import LatencyProfile

MAX_POSITION = 131_072
# What a profile does not say of its model's shape, from the model's own config.json: inner size,
# attention heads, KV heads.
SHAPES = {
    "h200_qwen2.5-32b": (27_648, 40, 8),
    "h200_qwen2.5-14b": (13_824, 40, 8),
    "a100_codellama-34b": (22_016, 64, 8),
}


def _config(profile: LatencyProfile) -> dict[str, Any]:
    if profile.name not in SHAPES:
        raise ValueError(
            f"profile {profile.name!r}: the shape of its model is unknown; known are those of "
            f"{', '.join(SHAPES)}"
        )
    inner, heads, kv_heads = SHAPES[profile.name]
    return {
        # Every profile's: vLLM only asks the class what it supports.
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": profile.hidden_size,
        "intermediate_size": inner,
        "num_hidden_layers": profile.num_hidden_layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": profile.hidden_size // heads,
        "vocab_size": profile.vocab_size,
        "max_position_embeddings": MAX_POSITION,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": profile.dtype,
        "bos_token_id": SPECIAL_TOKENS.index("<bos>"),
        "eos_token_id": SPECIAL_TOKENS.index("<eos>"),
        "pad_token_id": SPECIAL_TOKENS.index("<pad>"),
    }


def make(folder: Path, profile: LatencyProfile) -> Path:
    """Writes config.json and the tokenizer into `folder`; returns it."""
    config = json.dumps(_config(profile), indent=1)
    marker = folder / "config.json"
    if marker.is_file() and marker.read_text(encoding="utf-8") == config:
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    write_tokenizer(folder, MAX_POSITION)
    # Last: with it the folder is complete.
    partial = folder / "config.partial"
    partial.write_text(config, encoding="utf-8")
    partial.replace(marker)
    return folder
