"""What is read of vLLM's queues, on plain objects: no vLLM."""

from itertools import islice
from types import SimpleNamespace

from vllm_ppbalance.config import Settings
from vllm_ppbalance.controller import Controller
from vllm_ppbalance.reader import waiting_prompts

COUNT = 10_000


def request(name, tokens=100, computed=0):
    return SimpleNamespace(
        request_id=name, num_tokens=tokens, num_computed_tokens=computed, arrival_time=0.0
    )


class Queue:
    """Sorts as it is walked through, as vLLM's priority queue does."""

    def __init__(self, requests):
        self.requests, self.taken = requests, 0

    def __iter__(self):
        for one in self.requests:
            self.taken += 1
            yield one


def test_of_a_deep_queue_no_more_is_sorted_than_is_looked_at():
    own = Controller(Settings(), 4, "step")
    queue = Queue([request(f"r{i}") for i in range(COUNT)])
    for one in queue.requests:
        own.backlog.arrived(one.request_id, one.num_tokens)
    scheduler = SimpleNamespace(running=[], waiting=queue, skipped_waiting=[])
    head = list(islice(waiting_prompts(scheduler, own), 16))
    assert [prompt.request_id for prompt in head] == [f"r{i}" for i in range(16)]
    assert queue.taken == 16
    assert len(list(waiting_prompts(scheduler, own, True))) == COUNT
