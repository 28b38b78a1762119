"""vLLM requests in virtual time, with prompts that tell them apart."""

from collections.abc import Sequence
from functools import cache
from typing import Any
from zlib import crc32

from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.request import Request

_REGEX = "[ab]*"  # never complete, so that structured requests run to max_tokens


@cache
def _block_hasher(block_size: int, algorithm: str) -> Any:
    hash_fn = get_hash_fn_by_name(algorithm)
    init_none_hash(hash_fn)
    return get_request_block_hasher(block_size, hash_fn)


def prompt_tokens(request_id: str, length: int) -> list[int]:
    """`length` token ids whose first ones tell requests apart, so that no prefix is shared."""
    tokens = [7] * length
    digest = crc32(request_id.encode())
    for i in range(min(length, 4)):
        tokens[i] = 3 + (digest >> 8 * i & 0xFF)
    return tokens


def make_request(
    request_id: str,
    prompt: int | Sequence[int],
    max_tokens: int,
    arrival_s: float = 0.0,
    *,
    scheduler: Any = None,
    priority: int = 0,
    lora_id: int = 0,
    structured: bool = False,
) -> Any:
    """A vLLM `Request` that stops at `max_tokens` only; `prompt` is token ids or their number.

    With `scheduler`, prompt blocks are hashed when its prefix cache is on, and the grammar of a
    `structured` request is compiled before this returns: a background thread is no virtual time.
    """
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    if structured:
        params.structured_outputs = StructuredOutputsParams(regex=_REGEX)
        params.structured_outputs._backend = "xgrammar"
    hasher = None
    if scheduler is not None and scheduler.cache_config.enable_prefix_caching:
        cache_config = scheduler.cache_config
        hasher = _block_hasher(scheduler.block_size, cache_config.prefix_caching_hash_algo)
    tokens = prompt_tokens(request_id, prompt) if isinstance(prompt, int) else list(prompt)
    request = Request(
        request_id=request_id,
        prompt_token_ids=tokens,
        sampling_params=params,
        pooling_params=None,
        arrival_time=arrival_s,
        priority=priority,
        lora_request=LoRARequest(f"lora{lora_id}", lora_id, "unused") if lora_id else None,
        block_hasher=hasher,
    )
    if structured:
        _compile_grammar(scheduler, request)
    return request


def _compile_grammar(scheduler: Any, request: Any) -> None:
    if scheduler is None:
        raise ValueError("a structured request needs the scheduler that compiles its grammar")
    scheduler.structured_output_manager.grammar_init(request)
    pending = request.structured_output_request._grammar
    if hasattr(pending, "result"):
        pending.result()
