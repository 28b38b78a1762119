"""The engine is paused, or its KV cache is reset under running requests: real schedulers."""

import pytest

pytest.importorskip("vllm")

from vllm.v1.core.sched.interface import PauseState

from bench.clock import VirtualClock
from bench.engine import Engine
from bench.engine_types import RequestSpec
from bench.pipeline import Pipeline
from bench.vllm_harness import VllmAdapter, build_scheduler
from tests.worlds import ASYNC, SYNC, settings, stage_s
from vllm_ppbalance import Scheduler

pytestmark = pytest.mark.scheduler
each_mode = pytest.mark.parametrize("mode", [SYNC, ASYNC], ids=["sync", "async-v2"])
each_rebalance = pytest.mark.parametrize("rebalance", ["even_share", "threshold"])


def load():
    return [
        RequestSpec(f"r{i}", 0.006 * (i // 6), 20 + 61 * i % 300, 20 + 7 * i % 30)
        for i in range(48)
    ]


def served(rebalance, mode, interrupt):
    """All that was served, with `interrupt(scheduler, engine)` after every 25th schedule()."""
    scheduler = build_scheduler(
        Scheduler,
        pp_size=4,
        num_gpu_blocks=1024,
        max_num_batched_tokens=256,
        prefix_caching=True,
        additional_config=settings(rebalance=rebalance),
        **mode,
    )
    steps = []

    def watch(output):
        steps.append(dict(output.num_scheduled_tokens))
        if len(steps) % 25 == 0 and len(steps) < 200:
            interrupt(scheduler)

    engine = Engine(
        scheduler,
        Pipeline([stage_s] * 4),
        VllmAdapter(),
        clock=VirtualClock(),
        on_schedule=watch,
        keep_tokens=True,
    )
    result = engine.run(load())
    while scheduler.pause_state != PauseState.UNPAUSED:
        scheduler.set_pause_state(PauseState.UNPAUSED)
        result = engine.run([])
    own = scheduler.ppbalance
    assert not scheduler.ppbalance_failed
    own.finished(scheduler.finished_req_ids)
    own.cohorts.begin_step(scheduler.current_step + 64, scheduler.finished_req_ids)
    assert not own.cohorts.ready
    assert not own.cohorts.holds_in_a_row
    assert not any(own.cohorts.parked.values())
    assert not own.prefilling
    assert len(own.backlog) == own.backlog.waiting_tokens == 0
    assert not own.timer.last_token_s
    assert scheduler.kv_cache_manager.usage == 0.0
    return {name: record.num_tokens for name, record in result.requests.items()}


WANTED = {spec.request_id: spec.max_tokens for spec in load()}


@each_rebalance
@each_mode
def test_a_reset_of_the_kv_cache_under_running_requests_loses_nobody(mode, rebalance):
    def reset(scheduler):
        assert scheduler.reset_prefix_cache(reset_running_requests=True)

    assert served(rebalance, mode, reset) == WANTED


@each_rebalance
@pytest.mark.parametrize("state", [PauseState.PAUSED_ALL, PauseState.PAUSED_NEW])
@each_mode
def test_a_pause_and_its_end_lose_nobody(mode, state, rebalance):
    assert served(rebalance, mode, lambda scheduler: scheduler.set_pause_state(state)) == WANTED
