"""One line in the log every ten seconds under load: what was decided and what it gained."""

import logging
from collections.abc import Sequence

from vllm_ppbalance.bubble_estimate import CAUSES, BubbleEstimate
from vllm_ppbalance.controller import Controller
from vllm_ppbalance.metrics import bubble_ratios

logger = logging.getLogger("vllm.ppbalance")

EVERY_S = 10.0


class StatusLine:
    """Logs the means since its last line; `due_s` is when the next one may come."""

    def __init__(self, own: Controller, bubbles: BubbleEstimate) -> None:
        self.due_s = float("-inf")
        self._own = own
        self._bubbles = bubbles
        self._begun = False
        self._remember()

    def _remember(self) -> None:
        self._totals = self._own.timer.totals
        self._idle_s = list(self._bubbles.idle_s)
        self._work_s = self._bubbles.work_s
        self._moves = self._own.num_moves

    def log(self, now_s: float, budget: int | None, decodes: Sequence[int]) -> None:
        """Log a line; the first call only notes where the first ten seconds begin."""
        own, bubbles = self._own, self._bubbles
        self.due_s = now_s + EVERY_S
        if self._begun:
            window = own.timer.totals.since(self._totals)
            now_idle_s = zip(CAUSES, self._idle_s, bubbles.idle_s, strict=True)
            idle_s = {cause: after - before for cause, before, after in now_idle_s}
            ratios = bubble_ratios(idle_s, bubbles.work_s - self._work_s)
            logger.info(
                "ppbalance: budget %s tokens, decodes %s, moves %d, mean TTFT %s, mean token gap "
                "%s, bubbles %s.",
                budget,
                "/".join(map(str, decodes)),
                own.num_moves - self._moves,
                _ms(window.mean_ttft_s),
                _ms(window.mean_gap_s),
                ", ".join(f"{cause} {share:.1%}" for cause, share in ratios.items()) or "unknown",
            )
        self._begun = True
        self._remember()


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1e3 * seconds:.1f} ms"
