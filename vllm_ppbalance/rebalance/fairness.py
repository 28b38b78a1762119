"""Who has been held enough: at most one held stretch in pp_size rounds, beyond a standing plan."""

from collections.abc import Mapping
from math import ceil

from vllm_ppbalance.state import Decode


class Fairness:
    """Remembers until which step a decode must not be held again."""

    def __init__(self) -> None:
        self._free_at: dict[str, int] = {}
        self._tidy_at = 0

    def free(self, decode: Decode, step: int, pp_size: int) -> bool:
        """Whether `decode` may be held at `step`."""
        return (
            decode.holds_in_a_row < pp_size - 1 and self._free_at.get(decode.request_id, 0) <= step
        )

    def note(self, holds: Mapping[str, int], step: int, pp_size: int, parks: float) -> None:
        """Note holds made at `step`; `parks` is the share of the decodes that must sit out anyway.

        Where that share is always out, each decode waits pp_size * parks / (1 - parks) steps a
        round. In pp_size rounds it may be held for so many, and once more.
        """
        planned = pp_size * pp_size * parks / (1.0 - parks)
        free_at = step + -(-pp_size * pp_size // (1 + ceil(planned)))
        for request_id, steps in holds.items():
            self._free_at[request_id] = max(free_at, step + steps + 1)
        if step >= self._tidy_at:
            self._tidy_at = step + pp_size * pp_size
            self._free_at = {name: at for name, at in self._free_at.items() if at > step}
