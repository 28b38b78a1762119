"""Tiered: delay scheduling to the GPU's tile, the excess parked and passed on step by step.

Source: "Revisiting Pipeline Parallelism for LLM Serving" (OSDI 2026), delay scheduling.
"""

from collections.abc import Mapping, Sequence

from vllm_ppbalance.config import Settings
from vllm_ppbalance.cost_model import CostModel
from vllm_ppbalance.state import Decode, LatencyTotals, PipelineState

UNIT = 128  # published; where a profile shows no tile


class Tiered:
    """Holds a micro-batch down to a multiple of the tile while the excess is small.

    Parked is who was held the step before: he is ready again now, and runs unless there is no room.
    Nobody is parked for pp_size steps in a row, and who was parked least goes first, so that the
    excess rotates. Of equals, `tpot_first` parks the oldest and `e2e_first` the newest.
    """

    def __init__(self, settings: Settings, cost_model: CostModel | None = None) -> None:
        self._settings = settings
        self._model = cost_model
        self._seen = LatencyTotals()
        self._next_look = 0
        self._parked_at = -2  # the last step somebody was parked in
        self._oldest_first = settings.rebalance.mode == "tpot_first"

    def hold(self, state: PipelineState) -> Mapping[str, int]:
        """The decodes to park, each for one step."""
        self._look(state)
        alive, unit = state.decodes_alive, self._unit()
        base = unit * state.pp_size
        tier = alive // base * base
        knobs = self._settings.rebalance
        headroom = (
            state.prefill_backlog() > knobs.waiting_tok_threshold
            and state.kv_free > self._settings.chunk.kv_free_threshold
        )
        per_batch = tier // state.pp_size
        if tier > 0 and alive < tier + knobs.load_alpha * base and not headroom:
            return {} if state.num_ready <= per_batch else self._hold_down(state, per_batch)
        ceiling = state.num_ready if headroom else per_batch + unit
        target = alive // state.pp_size
        # Who was not parked in the last step is not parked now: no need to read the decodes.
        if state.num_ready <= (target if state.step <= self._parked_at + 1 else ceiling):
            return {}
        return self._take_in(state, ceiling)

    def _hold_down(self, state: PipelineState, most: int) -> Mapping[str, int]:
        """All but `most` park."""
        return self._park(state, state.ready, len(state.ready) - most)

    def _take_in(self, state: PipelineState, ceiling: int) -> Mapping[str, int]:
        """Parked ones come in up to the mean; the micro-batch's own stay up to the ceiling."""
        parked = [decode for decode in state.ready if decode.holds_in_a_row > 0]
        own = [decode for decode in state.ready if decode.holds_in_a_row == 0]
        room = state.decodes_alive // state.pp_size - min(len(own), ceiling)
        stay_out = self._park(state, parked, len(parked) - max(room, 0))
        return {**stay_out, **self._park(state, own, len(own) - ceiling)}

    def _park(self, state: PipelineState, among: Sequence[Decode], count: int) -> dict[str, int]:
        """`count` of `among` for one step, without those who were parked long enough."""
        if count <= 0:
            return {}
        longest = state.pp_size - 1
        self._parked_at = state.step
        able = [item for item in enumerate(among) if item[1].holds_in_a_row < longest]
        return {d.request_id: 1 for _, d in sorted(able, key=self._rank)[:count]}

    def _rank(self, item: tuple[int, Decode]) -> tuple[int, int]:
        index, decode = item
        return decode.holds_in_a_row, index if self._oldest_first else -index

    def _unit(self) -> int:
        unit = self._settings.rebalance.base_unit
        if unit != "auto":
            return unit
        return (self._model.tile() if self._model is not None else 0) or UNIT

    def _look(self, state: PipelineState) -> None:
        """Renew, every pp_size steps, what mode `auto` goes by: the mean token gap since."""
        knobs = self._settings.rebalance
        if knobs.mode != "auto" or state.step < self._next_look:
            return
        self._next_look = state.step + state.pp_size
        gap_s = state.totals.since(self._seen).mean_gap_s
        self._seen = state.totals
        if gap_s is not None:
            self._oldest_first = gap_s >= knobs.tpot_first_ratio * self._settings.slo_tpot
