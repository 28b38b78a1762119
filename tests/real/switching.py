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
from vllm_ppbalance.chunk import make_chunk_policy
from vllm_ppbalance.config import Settings
from vllm_ppbalance.rebalance import make_rebalance_policy


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

    def look(self) -> None:
        text = self.file.read_text()
        if text == self.text or self.scheduler.running:
            return
        wanted = json.loads(text)
        settings = Settings.model_validate(wanted["settings"])
        # Only the policies change: what the controller knows of requests has to live on.
        controller = self.scheduler.ppbalance
        controller.settings = settings
        controller.chunk = make_chunk_policy(settings)
        controller.rebalance = make_rebalance_policy(settings)
        controller.num_moves = 0
        self.text, self.name = text, wanted["name"]

    def row(self) -> dict[str, Any]:
        return {
            "policy": self.name,
            "moves": self.scheduler.ppbalance.num_moves,
            "failed": self.scheduler.ppbalance_failed,
        }
