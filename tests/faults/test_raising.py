"""Every part of the plugin raises in turn: stock scheduling goes on and every token is stock's."""

from functools import cache

import pytest

pytest.importorskip("vllm")

from bench.engine_types import RequestSpec
from tests.worlds import MODES, serve
from vllm_ppbalance import (
    admission,
    chunk,
    cohorts,
    controller,
    measuring,
    metrics_seam,
    profiling,
    step_timer,
    telemetry,
)
from vllm_ppbalance import scheduler as ours

pytestmark = pytest.mark.scheduler
each_mode = pytest.mark.parametrize("mode", MODES.values(), ids=MODES)

# (where it is looked up, its name); what a request in the running depends on.
WHILE_SERVING = [
    (ours, "read_state"),
    (ours, "read_rows"),
    (ours, "reorder"),
    (ours.PPBalanceMixin, "_before"),
    (ours.PPBalanceMixin, "_after"),
    (ours.PPBalanceMixin, "_observe"),
    (ours.PPBalanceMixin, "_forget_preempted"),
    (controller.Controller, "arrived"),
    (controller.Controller, "steady"),
    (controller.Controller, "decide"),
    (controller.Controller, "finished"),
    (controller.Controller, "preempted"),
    (controller.Controller, "learn"),
    (controller.Controller, "predict"),
    (controller.Controller, "_budget"),
    (controller.Controller, "_order"),
    (controller.Controller, "_safe_hold"),
    (admission.OnTimeFirst, "order"),
    (chunk.BalancedChunk, "budget"),
    (cohorts.Cohorts, "begin_step"),
    (cohorts.Cohorts, "scheduled"),
    (cohorts.Cohorts, "completed"),
    (cohorts.Cohorts, "hold"),
    (step_timer.StepTimer, "scheduled"),
    (step_timer.StepTimer, "returned"),
    (step_timer.StepTimer, "stage_s"),
    (step_timer.StepTimer, "first_tokens"),
    (step_timer.StepTimer, "decode_tokens"),
    (step_timer.StepTimer, "forget"),
    (telemetry.Telemetry, "_note"),
    (telemetry.Telemetry, "_attach"),
]
AT_START = [
    (ours, "Controller"),
    (ours, "cadence"),
    (ours, "smallest_budget"),
    (ours, "can_reorder"),
    (ours, "OnTimeFirst"),
    (ours, "start_telemetry"),
    (measuring, "prepare"),
    (metrics_seam, "_add_field"),
]
WHILE_MEASURING = [
    (profiling.ProfileRun, "feed"),
    (profiling.ProfileRun, "collect"),
    (profiling.ProfileRun, "stop"),
    (measuring, "finish"),
]


def name_of(part):
    owner, name = part
    return f"{getattr(owner, '__name__', owner).rsplit('.', 1)[-1]}.{name}"


def load(start_s=0.0):
    """Prompts that wait, decodes that move, and so little KV cache that some are preempted."""
    return [
        RequestSpec(f"r{i}", start_s + 0.004 * (i // 4), 40 + 37 * i % 400, 5 + 11 * i % 40)
        for i in range(48)
    ]


@cache
def stock_tokens(mode):
    return serve(load(), stock=True, **options(mode)).tokens


def options(mode):
    return {
        "pp_size": 4,
        "num_gpu_blocks": 220,
        "max_num_batched_tokens": 512,
        "max_num_seqs": 32,
        **MODES[mode],
    }


def settings(tmp_path, measuring="off"):
    own = {
        "slo_ttft": 0.05,  # so short that the order of admission changes
        "profiling": {"directory": str(tmp_path / "profiles"), "mode": measuring},
        "trace": str(tmp_path / "steps.jsonl"),
    }
    return {"ppbalance": own}


def plant(monkeypatch, part, after):
    """The part works `after` times and then raises, always."""
    owner, name = part
    original, calls = getattr(owner, name), []

    def raising(*args, **kwargs):
        calls.append(name)
        if len(calls) > after:
            raise RuntimeError(f"planted in {name}")
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, name, raising)
    return calls


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("part", WHILE_SERVING, ids=name_of)
@pytest.mark.parametrize("after", [0, 25])
def test_raising_while_serving(part, after, mode, monkeypatch, tmp_path):
    calls = plant(monkeypatch, part, after)
    ran = serve(load(), additional_config=settings(tmp_path), **options(mode))
    assert ran.tokens == stock_tokens(mode)
    assert not ran.scheduler.requests
    assert ran.scheduler.kv_cache_manager.usage == 0.0
    ran.scheduler.shutdown()
    if len(calls) > after:
        assert ran.scheduler.ppbalance_failed or ran.scheduler.telemetry.broken


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("part", AT_START, ids=name_of)
def test_raising_at_start(part, mode, monkeypatch, tmp_path):
    assert plant(monkeypatch, part, 0) == []
    ran = serve(load(), additional_config=settings(tmp_path), **options(mode))
    assert ran.tokens == stock_tokens(mode)
    ran.scheduler.shutdown()
    if part[0] is ours:
        assert ran.scheduler.ppbalance_failed


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("part", WHILE_MEASURING, ids=name_of)
@pytest.mark.parametrize("after", [0, 12])
@pytest.mark.parametrize("start_s", [0.3, 60.0])
def test_raising_while_measuring_at_start(part, after, start_s, mode, monkeypatch, tmp_path):
    plant(monkeypatch, part, after)
    requests = load(start_s)
    config = settings(tmp_path, "always")
    ran = serve(requests, additional_config=config, **options(mode))
    assert ran.tokens == stock_tokens(mode)
    ran.scheduler.shutdown()


@pytest.mark.parametrize("mode", MODES)
def test_the_load_reaches_what_is_planted_in(mode, monkeypatch, tmp_path):
    """Else the tests above would pass for nothing: counts calls without raising."""
    counts = {name_of(part): plant(monkeypatch, part, 1 << 30) for part in WHILE_SERVING}
    serve(load(), additional_config=settings(tmp_path), **options(mode)).scheduler.shutdown()
    never = {name for name, calls in counts.items() if not calls}
    assert not never


@pytest.mark.parametrize("mode", MODES)
def test_times_that_make_no_model_leave_the_policies_working(mode, monkeypatch, tmp_path):
    """Seen on a real server whose measuring a request had ended after a few micro-batches."""

    def no_model(*args, **kwargs):
        raise ValueError("seconds must be finite and above 0")

    monkeypatch.setattr(profiling, "fit_cost_model", no_model)
    ran = serve(load(60.0), additional_config=settings(tmp_path, "always"), **options(mode))
    assert ran.tokens == stock_tokens(mode)
    assert not ran.scheduler.ppbalance_failed
    ran.scheduler.shutdown()
