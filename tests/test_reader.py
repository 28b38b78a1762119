"""What is read of vLLM's queues, on plain objects: no vLLM."""

from collections import deque
from itertools import islice
from types import SimpleNamespace

from vllm_ppbalance.apply import reorder
from vllm_ppbalance.config import Settings
from vllm_ppbalance.controller import Controller
from vllm_ppbalance.reader import waiting_prompts
from vllm_ppbalance.state import Order

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


def ids(queue):
    return [one.request_id for one in queue]


class Fcfs(deque):
    """As vLLM's, a deque with names of its own; counts how often it is walked through."""

    walks = 0

    add_request, prepend_request = deque.append, deque.appendleft

    def remove(self, one):
        self.walks += 1
        super().remove(one)

    def remove_requests(self, gone):
        self.walks += 1
        rest = [one for one in self if one not in list(gone)]
        self.clear()
        self.extend(rest)


def test_late_requests_are_found_by_their_place_however_long_the_queue():
    names = [f"r{i}" for i in range(20)]
    requests = {name: request(name) for name in names}
    queue = Fcfs(requests.values())
    reorder(queue, Order(("r15", "r16"), (), 5), requests)
    assert ids(queue) == ["r15", "r16", *names[:15], *names[17:]]
    assert not queue.walks


def test_requests_elsewhere_in_the_queue_or_not_in_it_are_moved_or_ignored():
    names = [f"r{i}" for i in range(6)]
    requests = {name: request(name) for name in (*names, "admitted")}
    queue = Fcfs(requests[name] for name in names)
    order = Order(("r3", "gone", "admitted", "r1"), (), 2)
    reorder(queue, order, requests)
    assert ids(queue) == ["r3", "r1", "r0", "r2", "r4", "r5"]
    reorder(queue, Order(("r5",), ("r3", "gone", "r0")), requests)
    assert ids(queue) == ["r5", "r1", "r2", "r4", "r3", "r0"]
