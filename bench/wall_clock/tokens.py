"""Tokens made up for a request: a function of its prompt and the position, whatever the schedule.

vLLM-free. So the same prompts give the same text under every policy, and outputs can be compared.
"""

from array import array
from collections.abc import Mapping, Sequence
from typing import Any
from zlib import crc32

import numpy as np

# Of the tokenizer of `bench.tiny_model`: special tokens, then bytes, printable ASCII first.
EOS = 2
FIRST_PRINTABLE = 4
NUM_PRINTABLE = 94


def prompt_digest(token_ids: Sequence[int]) -> int:
    """32 bits of a prompt."""
    return crc32(array("I", token_ids).tobytes())


def token_at(digest: int, position: int) -> int:
    """The token at an output position: a printable character, never the end of the text."""
    return FIRST_PRINTABLE + crc32(b"%d/%d" % (digest, position)) % NUM_PRINTABLE


def allowed_token(bitmask: Any, wanted: int) -> int:
    """The allowed token nearest above `wanted`, cyclic; the end of the text if nothing else is.

    `bitmask` is an array of int32, 32 tokens a word. Raises ValueError where it allows none.
    """
    bits = np.unpackbits(np.ascontiguousarray(bitmask, np.int32).view(np.uint8), bitorder="little")
    allowed = np.flatnonzero(bits)
    if not len(allowed):
        raise ValueError("the grammar allows no token")
    text = allowed[allowed != EOS]
    if not len(text):
        return EOS
    return int(text[np.searchsorted(text, wanted) % len(text)])


def guided(request_ids: Sequence[str], bitmask: Any, sampled: Mapping[str, int]) -> dict[str, int]:
    """Tokens of the requests that follow a grammar: as near to `sampled` as it allows.

    `bitmask` has a row a request, in the order of `request_ids`.
    """
    rows = zip(request_ids, bitmask, strict=False)
    return {rid: allowed_token(row, sampled[rid]) for rid, row in rows if rid in sampled}
