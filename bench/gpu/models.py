"""Models of Qwen2.5 shapes without weights: `python -m bench.gpu.models NAME FOLDER`.

`-stage` is a quarter of the layers and a vocabulary of 1,024: a middle stage of four, on one GPU.
"""

import argparse
import json
from pathlib import Path

BIG = {"hidden_size": 5120, "num_attention_heads": 40, "vocab_size": 152064}
SHAPES = {
    "tiny": {"hidden_size": 256, "num_attention_heads": 8, "vocab_size": 512}
    | {"intermediate_size": 256, "num_hidden_layers": 8},
    "qwen2.5-32b": BIG | {"intermediate_size": 27648, "num_hidden_layers": 64},
    "qwen2.5-14b": BIG | {"intermediate_size": 13824, "num_hidden_layers": 48},
}
STAGES = 4
SHAPES |= {
    f"{name}-stage": {
        **SHAPES[name],
        "vocab_size": 1024,
        "num_hidden_layers": SHAPES[name]["num_hidden_layers"] // STAGES,
    }
    for name in ("qwen2.5-32b", "qwen2.5-14b")
}


def write_model(folder: Path, name: str) -> None:
    """A config.json of the shapes `name`; neither weights nor tokenizer."""
    config = {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": 2,
        **SHAPES[name],
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")


def main() -> None:
    """Write one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=SHAPES)
    parser.add_argument("folder", type=Path)
    arguments = parser.parse_args()
    write_model(arguments.folder, arguments.name)


if __name__ == "__main__":
    main()
