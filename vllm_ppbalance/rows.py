"""Reads a `schedule()` result: which rows decode or compute a prompt, and what comes of them."""

from collections.abc import Mapping, Set
from typing import Any, NamedTuple

from vllm_ppbalance.controller import Controller
from vllm_ppbalance.state import MicroBatch

NOBODY: Set[str] = frozenset()


class Rows(NamedTuple):
    """The micro-batch with the ids of its rows."""

    batch: MicroBatch
    ran: Set[str]
    prompts: Set[str]  # that compute their prompt
    ended: Set[str]  # whose prompt ends here
    firsts: Set[str]  # of these, those without a token yet
    decodes: Set[str]  # that add a token to a running decode
    admitted: bool  # whether any of them did not run before, or resumes


def read_rows(scheduler: Any, own: Controller, output: Any) -> Rows:
    """Read a fresh result that is not empty, and note whose prompts are still being computed."""
    tokens: Mapping[str, int] = output.num_scheduled_tokens
    ran, requests = tokens.keys(), scheduler.requests
    prompts = _prompts(own, output, ran)
    cached = output.scheduled_cached_reqs
    context = sum(cached.num_computed_tokens)
    decode_tokens = output.total_num_scheduled_tokens
    decodes: Set[str] = ran
    ended: set[str] = set()
    firsts: set[str] = set()
    last_chunks: list[tuple[int, int]] = []  # that end their prompt
    other_chunks: list[tuple[int, int]] = []
    admitted = False
    if prompts:
        # A prompt without a token yet adds no gap; a recomputed one must not.
        if scheduler.num_spec_tokens or not own.timer.last_token_s.keys().isdisjoint(prompts):
            decodes = ran - prompts
        admitted = bool(output.scheduled_new_reqs or cached.resumed_req_ids)
        if admitted:
            own.left_queue(prompts)
        for new_request in output.scheduled_new_reqs:
            request = requests[new_request.req_id]
            if not request.num_preemptions:  # one that resumes finds its own blocks
                own.backlog.admitted(request.num_tokens, new_request.num_computed_tokens)
    prefilling = own.prefilling
    for request_id in sorted(prompts):
        request, new = requests[request_id], tokens[request_id]
        before = request.num_computed_tokens - new
        decode_tokens -= new
        if request_id in prefilling or request_id in cached.resumed_req_ids:
            context -= before
        if request.is_prefill_chunk:
            other_chunks.append((new, before))
            prefilling.add(request_id)
        else:
            last_chunks.append((new, before))
            prefilling.discard(request_id)
            ended.add(request_id)
            if not request.num_output_tokens:
                firsts.add(request_id)
    batch = MicroBatch(
        scheduler.current_step,
        len(ran),
        len(ran) - len(prompts),
        decode_tokens,
        context,
        (*last_chunks, *other_chunks),
        len(ran) - len(other_chunks),
    )
    return Rows(batch, ran, prompts, ended, firsts, decodes, admitted)


def _prompts(own: Controller, output: Any, ran: Set[str]) -> Set[str]:
    """Rows that were still computing their prompt: new, resumed, or chunked before."""
    resumed: Set[str] = output.scheduled_cached_reqs.resumed_req_ids
    prefilling = own.prefilling
    if not (output.scheduled_new_reqs or resumed or prefilling):
        return NOBODY
    prompts = prefilling & ran
    if output.scheduled_new_reqs:
        prompts.update(new.req_id for new in output.scheduled_new_reqs)
    return prompts | resumed if resumed else prompts
