"""The wall clock jumps while requests run, as NTP or an operator may make it."""

import pytest
from prometheus_client import CollectorRegistry

pytest.importorskip("vllm")

from bench.clock import VirtualClock
from bench.engine import Engine
from bench.pipeline import Pipeline
from bench.vllm_harness import VllmAdapter, build_scheduler
from tests.faults.test_raising import load, options, settings, stock_tokens
from tests.worlds import MODES, stage_s
from vllm_ppbalance import Scheduler
from vllm_ppbalance.metrics_page import MetricsPage

pytestmark = pytest.mark.scheduler
HOUR_S = 3600.0


class JumpingClock(VirtualClock):
    """`time()` is off by `by_s` from `at_s` on; `monotonic()` is not."""

    def __init__(self, at_s, by_s):
        super().__init__()
        self.at_s, self.by_s = at_s, by_s

    def time(self):
        now_s = self.monotonic()
        return now_s + (self.by_s if now_s >= self.at_s else 0.0)


@pytest.mark.parametrize("by_s", [HOUR_S, -HOUR_S, 1e9, -1e9])
@pytest.mark.parametrize("mode", MODES)
def test_a_jump_loses_nothing(mode, by_s, tmp_path):
    scheduler = build_scheduler(
        Scheduler, additional_config=settings(tmp_path), log_stats=True, **options(mode)
    )
    clock = JumpingClock(0.1, by_s)
    engine = Engine(
        scheduler, Pipeline([stage_s] * 4), VllmAdapter(), clock=clock, keep_tokens=True
    )
    payloads, update = [], scheduler.update_from_output

    def watched(*args, **kwargs):
        result = update(*args, **kwargs)
        payloads.extend(
            stats.ppbalance
            for out in result.values()
            if (stats := out.scheduler_stats) is not None and getattr(stats, "ppbalance", None)
        )
        return result

    scheduler.update_from_output = watched
    run = engine.run(load())
    assert {name: r.token_ids for name, r in run.requests.items()} == stock_tokens(mode)
    assert not scheduler.ppbalance_failed
    assert not scheduler.telemetry.broken
    scheduler.shutdown()
    assert payloads
    page = MetricsPage(CollectorRegistry())
    for payload in payloads:
        page.update("model", "0", payload)  # raises where a counter would go back
