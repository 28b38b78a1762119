"""Whether a cost model's predictions may be followed, from what it has seen and how far off it was.

Bounds and rates are this project's own.
"""

from vllm_ppbalance.base_table import BaseTable
from vllm_ppbalance.features import REFERENCE_TOKENS

MIN_SAMPLES = 32  # before a model is trusted that has no profile, or after a jump
MIN_SIZES = 3  # a table of fewer sizes says nothing about the others
MAX_ERROR = 0.5  # mean absolute error, as a share, from which the model is not trusted
ERROR_RATE = 1 / 32
FLAT = 1.05  # times that grow by less over FLAT_SPAN times the tokens cannot rank budgets
FLAT_SPAN = 8


class Trust:
    """The samples of one cost model, and why it should not be followed.

    `measured` are the smallest and largest micro-batch of its profile, tokens; None for a guess,
    which is not trusted until it has seen MIN_SAMPLES, and only where serving has shown it.
    """

    def __init__(self, measured: tuple[int, int] | None) -> None:
        self._needed = 0 if measured else MIN_SAMPLES
        self._least, self._most = measured or (1 << 30, 0)
        self.num_samples = 0
        self.mean_error = 0.0  # absolute, as a share of what was measured; recent samples

    def note(
        self, num_tokens: int, predicted_s: float, measured_s: float, weight: float = 1.0
    ) -> None:
        """Count a sample that was predicted before it was learnt; `weight` is its own trust."""
        self.num_samples += 1
        if num_tokens < self._least:
            self._least = num_tokens
        if num_tokens > self._most:
            self._most = num_tokens
        share = min(abs(predicted_s / measured_s - 1.0), 1.0)
        self.mean_error += ERROR_RATE * weight * (share - self.mean_error)

    def start_anew(self) -> None:
        """The stage has changed: as many samples again as after a guess."""
        self._needed = self.num_samples + MIN_SAMPLES

    def why_not(self, table: BaseTable) -> str | None:
        """Why a policy should use a fixed budget instead; None while the model is sound."""
        if len(table.tokens) < MIN_SIZES:
            return f"it was fitted on {len(table.tokens)} batch size(s), {MIN_SIZES} are needed"
        if self._needed > self.num_samples:
            what = "its first" if self._needed <= MIN_SAMPLES else "after a sudden change its"
            return f"{what} {MIN_SAMPLES} stage times are not measured yet"
        if self.mean_error > MAX_ERROR:
            return f"its predictions are off by {self.mean_error:.0%} on average"
        # Fewer tokens than that never differ on a GPU: reading the weights is all of their time.
        first, last = max(self._least, REFERENCE_TOKENS), self._most
        if last >= FLAT_SPAN * first and table.at(last) < FLAT * table.at(first):
            return f"{last} tokens seem to take no longer than {first}"
        return None
