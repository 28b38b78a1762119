"""An hour of load in virtual time: what telemetry keeps must not grow."""

import gc
import random
import time
import tracemalloc

import pytest

from vllm_ppbalance.config import Settings
from vllm_ppbalance.controller import Controller
from vllm_ppbalance.state import Decision, MicroBatch
from vllm_ppbalance.step_timer import Step
from vllm_ppbalance.telemetry import Telemetry

PP_SIZE, STAGE_S, HOUR_S = 4, 0.1, 3600.0
GROWTH = 64 << 10  # bytes; a list of one number a step would be over 280 KB


class Clock:
    """Virtual time."""

    def __init__(self):
        self.now_s = 0.0

    def monotonic(self):
        return self.now_s


class Outputs:
    """As much of vLLM's outputs as carries statistics."""

    def __init__(self):
        self.scheduler_stats = self

    ppbalance = None


def micro_batch(rng, step):
    prefills = tuple((rng.randint(1, 512), rng.randint(0, 4096)) for _ in range(rng.randint(0, 2)))
    decodes = rng.randint(1, 128)
    return MicroBatch(step, decodes, decodes, decodes, 500 * decodes, prefills, decodes)


def serve_until(telemetry, clock, end_s, rng, result):
    none = frozenset()
    while clock.now_s < end_s:
        clock.now_s += STAGE_S * rng.uniform(0.5, 1.5)
        batch = micro_batch(rng, int(clock.now_s / STAGE_S))
        reason = rng.choice(["grow", "shrink", f"made up {rng.random()}"])
        decision = Decision(rng.randint(128, 2048), {"r": 1}, reason)
        start_s = clock.now_s - PP_SIZE * STAGE_S
        telemetry.own.timer.last_stage = start_s, STAGE_S
        step = Step(None, batch.step, none, none, batch, start_s, decision)
        telemetry.completed(step, STAGE_S, clock.now_s)
        telemetry.attach(result, failed=False, idle=False)


@pytest.mark.slow
def test_an_hour_of_load_keeps_memory_flat(tmp_path):
    own, rng, clock = Controller(Settings(), PP_SIZE, "step"), random.Random(1), Clock()
    own.clock = clock
    trace = tmp_path / "steps.jsonl"
    telemetry = Telemetry(own, trace, 2048)
    result = {0: Outputs()}
    tracemalloc.start()
    sizes = []
    try:
        for end_s in (HOUR_S / 10, HOUR_S):
            serve_until(telemetry, clock, end_s, rng, result)
            while telemetry.trace.pending:
                time.sleep(0.05)
            gc.collect()
            sizes.append(tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()
        telemetry.close()
    print(f"{telemetry.totals.steps} micro-batches, {sizes} bytes")
    assert not telemetry.broken
    assert telemetry.totals.steps > 35_000
    assert telemetry.trace.dropped == 0
    assert sizes[1] - sizes[0] < GROWTH
