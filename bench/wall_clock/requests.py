"""What a worker keeps of the requests it is told of, and what a micro-batch asks of its stage.

vLLM-free: it reads the fields of a `SchedulerOutput`, of Model Runner V1 and V2 alike.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from bench.batch import BatchShape
from bench.wall_clock.tokens import prompt_digest, token_at


@dataclass(slots=True)
class _Request:
    num_prompt_tokens: int
    num_tokens: int  # prompt and output so far; a step that computes them all samples the next
    digest: int


@dataclass(frozen=True, slots=True)
class StepRows:
    """A micro-batch: its shape, its requests in order, and the token of those that get one."""

    shape: BatchShape
    request_ids: tuple[str, ...]
    sampled: dict[str, int]


class Requests:
    """All requests alive, by id. `samples` is for the last stage: others make up no tokens."""

    def __init__(self, samples: bool) -> None:
        self._samples = samples
        self._requests: dict[str, _Request] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def step(self, output: Any) -> StepRows:
        """Take in a scheduler's output; each exactly once, in the order of the steps."""
        for request_id in output.finished_req_ids:
            self._requests.pop(request_id, None)
        computed = dict(self._computed(output))
        prefills: list[tuple[int, int]] = []
        sampled: dict[str, int] = {}
        decodes = decode_context = 0
        for request_id, new in output.num_scheduled_tokens.items():
            request, before = self._requests[request_id], computed[request_id]
            after = before + new
            if new == 1 and before >= request.num_prompt_tokens:
                decodes += 1
                decode_context += after
            else:
                prefills.append((new, before))
            if after >= request.num_tokens:
                sampled[request_id] = token_at(request.digest, after - request.num_prompt_tokens)
                request.num_tokens = after + 1
        shape = BatchShape(tuple(prefills), decodes, decodes, decode_context)
        return StepRows(shape, tuple(output.num_scheduled_tokens), sampled)

    def _computed(self, output: Any) -> Iterator[tuple[str, int]]:
        """Tokens in the KV cache before this step, by request; new requests are noted."""
        for new in output.scheduled_new_reqs:
            prompt = new.prompt_token_ids
            if prompt is None:
                raise ValueError(f"request {new.req_id}: prompts must be tokens, not embeddings")
            # Model Runner V2 gets a preempted request again as a new one, with all its tokens.
            known = new.prefill_token_ids or prompt
            digest = prompt_digest(prompt) if self._samples else 0
            self._requests[new.req_id] = _Request(len(prompt), len(known), digest)
            yield new.req_id, new.num_computed_tokens
        cached = output.scheduled_cached_reqs
        yield from zip(cached.req_ids, cached.num_computed_tokens, strict=True)
