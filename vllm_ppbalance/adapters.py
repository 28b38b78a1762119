"""LoRA adapters of a micro-batch: no more than vLLM has room for.

Before 0.33 vLLM asks this only of the requests it admits in a step. Where those that run already
bring one adapter too many, an assertion ends its engine: decodes that were moved together, or a
decode beside the next chunk of a prompt that was admitted in another micro-batch.
"""

from collections.abc import Sequence
from typing import Any


def keep_within(max_loras: int, running: Sequence[Any], step: int) -> bool:
    """Keep out of `step` what brings one adapter too many, oldest admission first.

    `running` are vLLM's requests in its order. True where all their adapters fit a micro-batch.
    """
    ids = {request.lora_request.lora_int_id for request in running if request.lora_request}
    if len(ids) <= max_loras:
        return True
    taken: set[int] = set()
    for request in running:
        if request.lora_request and _wants_to_run(request, step):
            adapter = request.lora_request.lora_int_id
            if adapter in taken or len(taken) < max_loras:
                taken.add(adapter)
            else:
                request.next_decode_eligible_step = step + 1
    return False


def _wants_to_run(request: Any, step: int) -> bool:
    known = request.num_tokens_with_spec + request.num_output_placeholders
    return bool(request.next_decode_eligible_step <= step and known > request.num_computed_tokens)
