"""Makes a tiny random-weight Llama and its byte-level tokenizer in code: no hub, no download.

Run `python -m bench.tiny_model DIR`; a folder that already holds the same model is left alone.
"""

import argparse
import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from bench.byte_tokenizer import SPECIAL_TOKENS, vocabulary, write_tokenizer

SEED = 20260
MAX_POSITION = 4096


def _config() -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "vocab_size": len(vocabulary()),
        "max_position_embeddings": MAX_POSITION,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "bos_token_id": SPECIAL_TOKENS.index("<bos>"),
        "eos_token_id": SPECIAL_TOKENS.index("<eos>"),
        "pad_token_id": SPECIAL_TOKENS.index("<pad>"),
    }


def _weight_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, inner, vocab = (
        config[key] for key in ("hidden_size", "intermediate_size", "vocab_size")
    )
    queries = config["num_attention_heads"] * config["head_dim"]
    keys = config["num_key_value_heads"] * config["head_dim"]
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocab, hidden),
        "model.norm.weight": (hidden,),
        "lm_head.weight": (vocab, hidden),
    }
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        shapes |= {
            f"{prefix}.input_layernorm.weight": (hidden,),
            f"{prefix}.post_attention_layernorm.weight": (hidden,),
            f"{prefix}.self_attn.q_proj.weight": (queries, hidden),
            f"{prefix}.self_attn.k_proj.weight": (keys, hidden),
            f"{prefix}.self_attn.v_proj.weight": (keys, hidden),
            f"{prefix}.self_attn.o_proj.weight": (hidden, queries),
            f"{prefix}.mlp.gate_proj.weight": (inner, hidden),
            f"{prefix}.mlp.up_proj.weight": (inner, hidden),
            f"{prefix}.mlp.down_proj.weight": (hidden, inner),
        }
    return shapes


def _weights(config: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Norms are one; matrices keep the size of what they multiply, so every layer has a say."""
    generator = torch.Generator().manual_seed(SEED)
    weights = {}
    for name, shape in _weight_shapes(config).items():
        if len(shape) == 1:
            weights[name] = torch.ones(shape)
            continue
        scale = 1.0 if "embed" in name else 1.0 / math.sqrt(shape[1])
        weights[name] = torch.randn(shape, generator=generator) * scale
    # Logits far apart: which token is the largest must not hang on how float32 sums are ordered.
    weights["lm_head.weight"] *= 4.0
    return weights


def make(folder: Path) -> Path:
    """Writes the model into `folder` unless it is there already; returns the folder."""
    config = _config()
    marker = folder / "made.json"
    stamp = json.dumps({"seed": SEED, "config": config}, indent=1)
    if marker.is_file() and marker.read_text() == stamp:
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    write_tokenizer(folder, MAX_POSITION)
    save_file(_weights(config), folder / "model.safetensors", metadata={"format": "pt"})
    marker.write_text(stamp)
    return folder


def main() -> None:
    """Makes the model in the folder given on the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    print(make(parser.parse_args().folder))


if __name__ == "__main__":
    main()
