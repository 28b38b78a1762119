"""The start-up measurement inside a scheduler: begun, fed, and ended by whatever comes first."""

from collections.abc import Callable
from typing import Any

from vllm_ppbalance.controller import Controller
from vllm_ppbalance.profiling import (
    ProfileRun,
    abort_own_requests,
    finish,
    prepare,
    take_own_rows,
)
from vllm_ppbalance.startup_profile import own_request


class MeasuringMixin:
    """What a scheduler does about a `ProfileRun`; `_profile_run` is None when there is none."""

    ppbalance: Controller
    ppbalance_failed: bool
    _profile_run: ProfileRun | None
    _guard: Callable[..., None]

    def set_pause_state(self, *args: Any, **kwargs: Any) -> Any:
        """vLLM's set_pause_state(); an engine that may go to sleep has no requests of ours."""
        self._guard(self._end_profile, "the engine was paused")
        return super().set_pause_state(*args, **kwargs)  # type: ignore[misc]

    def reset_prefix_cache(self, *args: Any, **kwargs: Any) -> Any:
        """vLLM's reset_prefix_cache(), which fails while anybody holds KV blocks."""
        self._guard(self._end_profile, "the prefix cache was reset")
        return super().reset_prefix_cache(*args, **kwargs)  # type: ignore[misc]

    def _begin_profile(self, hash_block: int) -> None:
        self._profile_run = prepare(self, self.ppbalance, hash_block)

    def _make_way(self, request: Any) -> None:
        """A user's request ends the measuring."""
        if self._profile_run is not None and not own_request(request.request_id):
            self._guard(self._end_profile, "a request came in")

    def _measure(self, result: dict[int, Any]) -> None:
        """Take the rows of our requests out of what goes to the clients, and send more."""
        if self._profile_run is not None:
            self._guard(self._advance_profile, self._profile_run, result)
            if self.ppbalance_failed:
                take_own_rows(result)

    def _advance_profile(self, run: ProfileRun, result: dict[int, Any]) -> None:
        run.collect(result)
        run.feed(self.ppbalance.clock.monotonic())
        if run.profile.done:
            self._end_profile(run.profile.ended_by)

    def _end_profile(self, why: str) -> None:
        run = self._profile_run
        if run is not None:
            run.stop(why)  # before it is forgotten: if this fails, the guard ends its requests
            self._profile_run = None
            finish(run, self.ppbalance)

    def _abort_profile(self) -> None:
        if self._profile_run is not None:
            self._profile_run = None
            abort_own_requests(self)
