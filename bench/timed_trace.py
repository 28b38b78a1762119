"""Requests in the form that vLLM's own client replays: `--dataset-name timed_trace`."""

import json
from collections.abc import Sequence
from pathlib import Path

from bench.byte_tokenizer import write_tokenizer
from bench.trace_files import HASH_BLOCK_TOKENS
from bench.workloads import BenchRequest, block_ids

BLOCK_TOKENS = HASH_BLOCK_TOKENS  # --timed-trace-chunk-hash-size
_BLOCK_BITS = 64


def write_trace(requests: Sequence[BenchRequest], path: Path, salt: int) -> None:
    """One JSON line a request: seconds, lengths in tokens, and a number for each prompt block.

    vLLM draws the token ids of a block from its number: equal numbers give equal tokens, so
    requests of one trace share what their hash ids share, and traces of another `salt` nothing.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        for request in requests:
            row = {
                "timestamp": request.arrival_s,
                "input_length": request.prompt_tokens,
                "output_length": request.output_tokens,
                "hash_ids": [(salt << _BLOCK_BITS) + block for block in block_ids(request)],
            }
            file.write(json.dumps(row) + "\n")


def write_stand_in_tokenizer(folder: Path) -> Path:
    """A tokenizer for the client where the server's own is not at hand; returns the folder.

    The client only draws token ids from it, 4 to 259, which every larger vocabulary has; lengths
    are counted in token ids, so they are exact whatever tokenizer the server has.
    """
    write_tokenizer(folder, 1 << 30)
    # vLLM looks for a model's configuration beside a tokenizer.
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}), encoding="utf-8")
    return folder
