"""A scheduler for tests whose policies change between rounds, so one server start serves all.

SWITCH_FILE names a JSON file, {"name": ..., "settings": {...}}; a changed file takes effect when
the next schedule() finds nothing running.
"""

import json
import os
from pathlib import Path
from typing import Any

from bench.observed import observe
from vllm_ppbalance import Scheduler
from vllm_ppbalance.base_table import BaseTable
from vllm_ppbalance.chunk import make_chunk_policy
from vllm_ppbalance.config import Settings
from vllm_ppbalance.cost_model import CostModel
from vllm_ppbalance.features import UNITS, reference_units
from vllm_ppbalance.rebalance import make_rebalance_policy

TABLE = BaseTable((16, 64, 256, 1024, 4096), (0.0066, 0.0114, 0.0306, 0.1074, 0.4146))
TERMS_S = {"decodes": 1e-3, "square": 1e-7, "prefix": 2e-7}


def cost_model() -> CostModel:
    """A trusted model: 5 ms, 0.1 ms a token, 1 ms a decode, 0.1 us a pair of prompt tokens."""
    units = reference_units(TABLE)
    theta = [1.0, *(TERMS_S.get(name, 0.0) / units[name] for name in UNITS if name != "base")]
    table = BaseTable(TABLE.tokens, TABLE.seconds)
    model = CostModel(table, theta, profiled=True)
    model.note_prefixes(range(0, 8192, 512))
    return model


class SwitchingScheduler:
    """Makes `vllm_ppbalance.Scheduler`; writes a row a step that names the policies in force."""

    def __new__(cls, vllm_config: Any, *args: Any, **kwargs: Any) -> Any:
        scheduler = Scheduler(vllm_config, *args, **kwargs)
        switch = _Switch(scheduler, Path(os.environ["SWITCH_FILE"]))
        inner = scheduler.schedule

        def schedule(*inner_args: Any, **inner_kwargs: Any) -> Any:
            switch.look()
            return inner(*inner_args, **inner_kwargs)

        scheduler.schedule = schedule
        return observe(scheduler, switch.row)


class _Switch:
    def __init__(self, scheduler: Any, file: Path) -> None:
        self.scheduler = scheduler
        self.file = file
        self.text = ""
        self.name = ""
        self.budget: int | None = None  # None where a step needed no decision
        decide = scheduler.ppbalance.decide

        def noted(state: Any) -> Any:
            decision = decide(state)
            self.budget = decision.budget
            return decision

        scheduler.ppbalance.decide = noted

    def look(self) -> None:
        self.budget = None
        text = self.file.read_text()
        if text == self.text or self.scheduler.running:
            return
        wanted = json.loads(text)
        settings = Settings.model_validate(wanted["settings"])
        # Only the policies change: what the controller knows of requests has to live on.
        controller = self.scheduler.ppbalance
        controller.settings = settings
        # Not the controller's own: it would learn from this machine, which is slow and busy.
        model = cost_model()
        controller.chunk = make_chunk_policy(settings, model)
        controller.rebalance = make_rebalance_policy(settings, model)
        controller._plans_prefill = settings.rebalance.strategy == "auto"
        controller.num_moves = 0
        # Else only the first combination has prompts to compute.
        self.scheduler.kv_cache_manager.reset_prefix_cache()
        self.text, self.name = text, wanted["name"]

    def row(self) -> dict[str, Any]:
        return {
            "budget": self.budget,
            "reason": getattr(self.scheduler.ppbalance.chunk, "reason", ""),
            "policy": self.name,
            "moves": self.scheduler.ppbalance.num_moves,
            "failed": self.scheduler.ppbalance_failed,
        }
