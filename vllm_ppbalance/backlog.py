"""Prompt tokens that wait to be computed, kept up to date event by event: no scan of the queue."""

from collections.abc import Iterable

MEMORY = 1 / 32  # weight of the newest prompt in what is known of the prefix cache


class Backlog:
    """Tokens of the requests not yet admitted, and of all that ever arrived.

    `cached_share` is what part of a prompt was lately found in the prefix cache, 0 to 1.
    """

    def __init__(self) -> None:
        self.cached_share = 0.0
        self.waiting_tokens = 0
        self.arrived_tokens = 0
        self._waiting: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._waiting

    def arrived(self, request_id: str, num_tokens: int) -> None:
        """Count a new request."""
        self.arrived_tokens += num_tokens
        self.returned(request_id, num_tokens)

    def returned(self, request_id: str, num_tokens: int) -> None:
        """Count a request that has to compute its tokens again."""
        self.waiting_tokens += num_tokens - self._waiting.get(request_id, 0)
        self._waiting[request_id] = num_tokens

    def admitted(self, num_tokens: int, cached: int) -> None:
        """Note that a new request of `num_tokens` found `cached` of them computed."""
        if cached or self.cached_share:
            self.cached_share += MEMORY * (cached / num_tokens - self.cached_share)

    def left(self, request_ids: Iterable[str]) -> None:
        """Drop requests that were admitted, finished or aborted; others are ignored."""
        for request_id in request_ids:
            self.waiting_tokens -= self._waiting.pop(request_id, 0)
