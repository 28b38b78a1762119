"""Decisions into vLLM's fields; `reader.py` is the way back."""

from collections.abc import Mapping
from typing import Any

from vllm_ppbalance.cohorts import Cohorts
from vllm_ppbalance.reader import can_decode
from vllm_ppbalance.state import Order


def hold(requests: Mapping[str, Any], holds: Mapping[str, int], step: int) -> None:
    """Keep decodes out of `step` and as many after it as `holds` says; never sooner than vLLM."""
    for request_id, steps in holds.items():
        request = requests[request_id]
        request.next_decode_eligible_step = max(request.next_decode_eligible_step, step + steps)


def release_if_empty(requests: Mapping[str, Any], cohorts: Cohorts, step: int) -> None:
    """Let all held decodes run if nothing else can: those they made room for are gone.

    Never sooner than vLLM itself asks: a streaming session may have gone on since it was held.
    """
    ready = (requests.get(request_id) for request_id in cohorts.ready)
    if any(request is not None and can_decode(request, step) for request in ready):
        return
    for until, request_ids in cohorts.release().items():
        for request in filter(None, map(requests.get, request_ids)):
            if request.next_decode_eligible_step <= until:
                request.next_decode_eligible_step = step


def reorder(queue: Any, order: Order, requests: Mapping[str, Any]) -> None:
    """Move requests to the ends of vLLM's waiting queue; ids that are not in it are ignored.

    Where none goes last, those that go first are found by their place: a queue may hold tens of
    thousands.
    """
    if not order.last:
        place = len(queue) - order.late
        known = (requests.get(request_id) for request_id in order.first)
        taken = [r for r in known if r is not None and _take(queue, r, place)]
        for request in reversed(taken):
            queue.prepend_request(request)
        return
    moved = {*order.first, *order.last}
    found = {r.request_id: r for r in queue if r.request_id in moved}
    queue.remove_requests(found.values())
    for request_id in order.last:
        if request_id in found:
            queue.add_request(found[request_id])
    for request_id in reversed(order.first):
        if request_id in found:
            queue.prepend_request(found[request_id])


def _take(queue: Any, request: Any, place: int) -> bool:
    """Take a request out of the queue, at `place` if it is there; whether it was in it."""
    if 0 <= place < len(queue) and queue[place] is request:
        del queue[place]
        return True
    try:
        queue.remove(request)
    except ValueError:
        return False
    return True
