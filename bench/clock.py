"""Virtual time: one settable clock behind both of vLLM's, so that a run depends on nothing real.

vLLM's scheduler reads the time only to stamp log events, never to decide, so its own calls stay.
"""


class VirtualClock:
    """Seconds since the run began, moved by whoever drives it; fits the plugin's `Clock`."""

    def __init__(self, now_s: float = 0.0) -> None:
        self._now_s = now_s

    def monotonic(self) -> float:
        """Virtual seconds."""
        return self._now_s

    def time(self) -> float:
        """Virtual seconds: requests arrive on the same axis, so the epoch is the run's start."""
        return self._now_s

    def set(self, now_s: float) -> None:
        """Move to `now_s`; ValueError when that is in the past."""
        if now_s < self._now_s:
            raise ValueError(f"clock cannot go back from {self._now_s} s to {now_s} s")
        self._now_s = now_s
