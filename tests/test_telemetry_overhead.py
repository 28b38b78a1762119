"""What metrics and the step log cost beside vLLM's own schedule(), in the same run."""

from statistics import median
from time import perf_counter

import pytest

pytest.importorskip("vllm")

from tests.test_overhead import BLOCK, RUNNING, STEPS, Loop
from tests.worlds import ASYNC, SYNC, settings

NO_OPS = 2000


class ObservedLoop(Loop):
    """Also times what telemetry does with each finished micro-batch: `telemetry_s`."""

    def __init__(self, mode, config, prompts):
        super().__init__(mode | {"log_stats": True}, config, prompts)
        self.telemetry_s = 0.0
        telemetry = self.scheduler.telemetry
        for name in ("completed", "attach"):
            setattr(telemetry, name, self.timed(getattr(telemetry, name)))

    def timed(self, call):
        def wrapped(*args, **kwargs):
            started = perf_counter()
            call(*args, **kwargs)
            self.telemetry_s += perf_counter() - started

        return wrapped

    def in_schedule_s(self):
        """What telemetry adds to a schedule(): it times the two hooks there; least of five."""
        guard, telemetry = type(self.scheduler)._guard, self.scheduler.telemetry
        seconds = []
        for watched in (telemetry, None) * 5:
            self.scheduler.telemetry = watched
            started = perf_counter()
            for _ in range(NO_OPS):
                guard(self.scheduler, int)
            seconds.append(perf_counter() - started)
        self.scheduler.telemetry = telemetry
        return 2 * (min(seconds[::2]) - min(seconds[1::2])) / NO_OPS


@pytest.mark.parametrize("mode", [SYNC, ASYNC], ids=["sync", "async-v2"])
@pytest.mark.parametrize(("traced", "bound"), [(False, 0.01), (True, 0.02)], ids=["metrics", "log"])
@pytest.mark.parametrize("prompts", [0, 40], ids=["decodes", "mixed"])
def test_metrics_and_step_log_keep_schedule_fast(mode, traced, bound, prompts, tmp_path):
    config = settings(chunk="greedy", rebalance="even_share")
    if traced:
        config["ppbalance"]["trace"] = str(tmp_path / "steps.jsonl")
    loop = ObservedLoop(mode, config, prompts)
    schedule, update = [], []
    for _ in range(STEPS):
        loop.telemetry_s = 0.0
        ours_s, vllm_s = loop.step()
        schedule.append(ours_s + vllm_s)
        update.append(loop.telemetry_s)
    in_schedule = loop.in_schedule_s() / median(schedule)
    # As in test_overhead: the quietest stretch tells what the code costs.
    blocks = [slice(at, at + BLOCK) for at in range(0, STEPS, BLOCK)]
    in_update = min(median(update[b]) / median(schedule[b]) for b in blocks)
    print(
        f"schedule() {median(schedule) * 1e6:.0f} us at {RUNNING} requests: +{in_schedule:.2%}; "
        f"in update_from_output() {median(update) * 1e6:.1f} us, {in_update:.2%} of schedule()"
    )
    assert not loop.scheduler.telemetry.broken
    assert loop.scheduler.telemetry.totals.steps >= STEPS
    assert in_schedule < bound
    assert in_update < 3 * bound  # outside schedule(), but the engine's thread all the same
    loop.scheduler.telemetry.close()
