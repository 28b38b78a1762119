"""A byte-level tokenizer made in code: four special tokens, then one token a byte."""

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

SPECIAL_TOKENS = ("<unk>", "<bos>", "<eos>", "<pad>")


def vocabulary() -> dict[str, int]:
    """Special tokens, then one token a byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    return {token: i for i, token in enumerate((*SPECIAL_TOKENS, *alphabet))}


def write_tokenizer(folder: Path, max_tokens: int) -> Path:
    """Writes it in the Hugging Face format, for sequences of `max_tokens`; returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary(), merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    tokenizer.save(str(folder / "tokenizer.json"))
    names = dict(
        zip(("unk_token", "bos_token", "eos_token", "pad_token"), SPECIAL_TOKENS, strict=True)
    )
    settings = names | {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_tokens,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1))
    return folder
