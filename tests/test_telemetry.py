"""What a real scheduler's run leaves for the operator: on the wire, in the log, and on failure."""

import logging
from time import perf_counter
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

from bench.bubbles import Busy, Load, bubble_ratio, stage_use
from bench.clock import VirtualClock
from bench.engine import Engine
from bench.pipeline import Pipeline
from bench.vllm_harness import VllmAdapter, build_scheduler
from tests.worlds import ASYNC, MODES, SYNC, batch_of, serve, settings, stage_s
from vllm_ppbalance import Scheduler, metrics_seam
from vllm_ppbalance.bubble_estimate import CAUSES
from vllm_ppbalance.config import Settings
from vllm_ppbalance.controller import Controller
from vllm_ppbalance.metrics import bubble_ratios
from vllm_ppbalance.telemetry import start_telemetry

pytestmark = pytest.mark.scheduler
REQUESTS = 24


def engine(payloads=None, stage=stage_s, **options):
    """An engine whose scheduler keeps statistics; `payloads` gets what would be sent."""
    options.setdefault("num_gpu_blocks", 4096)
    options.setdefault("additional_config", settings(chunk="greedy", rebalance="even_share"))
    scheduler = build_scheduler(Scheduler, log_stats=True, pp_size=2, **options)
    update = scheduler.update_from_output

    def watched(*args, **kwargs):
        result = update(*args, **kwargs)
        for outputs in result.values():
            payload = getattr(outputs.scheduler_stats, "ppbalance", None)
            if payloads is not None and payload:
                payloads.append(payload)
        return result

    scheduler.update_from_output = watched
    return Engine(scheduler, Pipeline([stage] * 2), VllmAdapter(), clock=VirtualClock())


def total(payloads, name, label=""):
    return sum(payload[name].get(label, 0) for payload in payloads)


@pytest.fixture
def logged(caplog):
    """The messages with some words in them; a record that is handled twice counts once."""
    logging.getLogger("vllm").propagate = True

    def find(words, level=logging.INFO):
        records = {id(r): r for r in caplog.records if r.levelno >= level}
        return [m for m in (r.getMessage() for r in records.values()) if words in m]

    return find


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
def test_the_payloads_of_a_run_add_up_to_what_was_served(mode):
    payloads = []
    world = engine(payloads, **mode)
    result = world.run(batch_of(REQUESTS, prompt=200, max_tokens=120))
    busy = [step for step in result.steps if step.shape.num_tokens]
    assert total(payloads, "steps") == len(busy)
    assert total(payloads, "tokens", "prefill") == 200 * REQUESTS
    assert total(payloads, "tokens", "decode") == 119 * REQUESTS
    assert total(payloads, "moves") == world.scheduler.ppbalance.num_moves
    reasons = {reason for payload in payloads for reason in payload["decisions"]}
    assert sum(total(payloads, "decisions", reason) for reason in reasons) == len(busy)
    assert "steady" in reasons


def test_a_payload_a_second_under_load_and_the_last_one_when_idle():
    payloads = []
    world = engine(payloads, **SYNC)
    result = world.run(batch_of(4, max_tokens=1500))
    assert result.end_s > 15.0
    assert int(result.end_s) <= len(payloads) <= int(result.end_s) + 4
    assert payloads[-1]["cohort_decodes"].keys() == {"0", "1"}


def test_a_payload_reaches_the_page_of_the_api_server():
    """Over vLLM's own encoder, decoder and Prometheus logger."""
    from prometheus_client import REGISTRY
    from vllm.v1.engine import EngineCoreOutputs
    from vllm.v1.metrics.loggers import PrometheusStatLogger
    from vllm.v1.metrics.stats import SchedulerStats
    from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

    assert metrics_seam.install()
    stats = SchedulerStats(num_running_reqs=3)
    stats.ppbalance = {"steps": {"": 4.0}, "token_budget": {"": 384.0}}
    wire = MsgpackEncoder().encode(EngineCoreOutputs(scheduler_stats=stats))
    read = MsgpackDecoder(EngineCoreOutputs).decode(wire).scheduler_stats
    assert (read.num_running_reqs, read.ppbalance) == (3, stats.ppbalance)

    config = engine(**SYNC).scheduler.vllm_config
    labels = {"model_name": str(config.model_config.served_model_name), "engine": "0"}

    def shown(name):
        return REGISTRY.get_sample_value(name, labels) or 0.0

    before = shown("ppbalance_steps_total")
    for _ in range(2):  # a second engine in the process clears vLLM's own metrics, and only those
        PrometheusStatLogger(config, [0]).record(read, None, engine_idx=0)
    assert shown("ppbalance_steps_total") == before + 8.0
    assert shown("ppbalance_token_budget") == 384.0
    assert shown("vllm:num_requests_running") == 3.0


def test_statistics_without_ours_are_made_and_sent_as_before():
    import dataclasses

    from vllm.v1.engine import EngineCoreOutputs
    from vllm.v1.metrics.stats import SchedulerStats
    from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

    metrics_seam.install()
    copy = dataclasses.replace(SchedulerStats(num_running_reqs=3), num_waiting_reqs=1)
    assert copy == SchedulerStats(num_running_reqs=3, num_waiting_reqs=1)
    wire = MsgpackEncoder().encode(EngineCoreOutputs(scheduler_stats=copy))
    assert MsgpackDecoder(EngineCoreOutputs).decode(wire).scheduler_stats == copy


def test_a_vllm_without_the_way_in_gets_one_warning_and_no_metrics(monkeypatch, logged):
    import vllm.v1.metrics.stats as stats

    metrics_seam._warn.cache_clear()
    monkeypatch.setattr(stats, "SchedulerStats", object)
    assert not metrics_seam.install()
    assert not metrics_seam.install()
    assert len(logged("no metrics on vLLM's page", logging.WARNING)) == 1


def test_metrics_can_be_turned_off():
    config = settings(chunk="greedy")
    config["ppbalance"]["metrics"] = False
    payloads = []
    engine(payloads, additional_config=config, **SYNC).run(batch_of(4))
    assert payloads == []


def test_each_data_parallel_rank_writes_a_step_log_of_its_own(tmp_path):
    own = Controller(Settings(trace=str(tmp_path / "steps.jsonl")), 2, "step")
    for rank in range(3):
        config = SimpleNamespace(
            parallel_config=SimpleNamespace(data_parallel_index=rank),
            scheduler_config=SimpleNamespace(max_num_batched_tokens=2048),
        )
        start_telemetry(own, config).close()
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"steps.jsonl", "steps.jsonl.dp1", "steps.jsonl.dp2"}


def test_failing_metrics_end_neither_the_requests_nor_the_policies(logged):
    world = engine(**ASYNC)
    scheduler = world.scheduler
    scheduler.telemetry.totals = None
    world.run(batch_of(REQUESTS, prompt=200))
    assert len(logged("metrics and step log failed", logging.ERROR)) == 1
    assert scheduler.telemetry.broken
    assert not scheduler.ppbalance_failed
    assert scheduler.ppbalance.num_moves > 0


def test_failing_policies_are_told_on_the_page():
    payloads = []
    world = engine(payloads, **SYNC)
    world.scheduler.ppbalance.chunk = None
    world.run(batch_of(4))
    assert world.scheduler.ppbalance_failed
    assert payloads[-1]["fallback"]["stock"] == 1.0


def test_a_line_at_most_every_ten_seconds_while_there_is_load(caplog, logged):
    caplog.set_level(logging.INFO, logger="vllm.ppbalance")
    result = engine(**SYNC).run(batch_of(8, max_tokens=4000))
    lines = logged("mean TTFT")
    assert result.end_s > 35.0
    assert len(lines) == int(result.end_s / 10.0)
    assert "bubbles prefill_prefill" in lines[0]


def test_decisions_are_logged_at_debug_level(caplog, logged):
    caplog.set_level(logging.DEBUG, logger="vllm.ppbalance")
    result = engine(**SYNC).run(batch_of(3, max_tokens=5))
    assert len(logged("prompt tokens", logging.DEBUG)) == sum(
        step.shape.num_tokens > 0 for step in result.steps
    )


BUBBLE_CASES = {
    "one large budget": ("fixed", "off", 40),
    "greedy, even": ("greedy", "even_share", 40),
    "few requests": ("greedy", "even_share", 3),
}


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
@pytest.mark.parametrize(("chunk", "rebalance", "count"), BUBBLE_CASES.values(), ids=BUBBLE_CASES)
def test_the_estimated_bubbles_are_those_of_the_stages(mode, chunk, rebalance, count):
    """Against the stages' own times in virtual time: within 3 points of stage time, by cause."""
    requests = [
        request
        for i in range(count)
        for request in batch_of(
            1, 50 + 97 * i % 900, 20 + 13 * i % 60, arrival_s=0.03 * i, prefix=f"r{i}-"
        )
    ]
    ran = serve(requests, additional_config=settings(chunk, rebalance), pp_size=4, **mode)
    bubbles = ran.scheduler.telemetry.bubbles
    estimated = bubble_ratios(dict(zip(CAUSES, bubbles.idle_s, strict=True)), bubbles.work_s)
    stages = [[Busy(*interval) for interval in rows] for rows in ran.intervals]
    loads = {s.step: Load(s.shape.prefill_tokens, s.shape.decodes) for s in ran.result.steps}
    work = [(r.arrival_s, r.last_token_s) for r in ran.result.requests.values()]
    truth = bubble_ratio(stage_use(stages, loads, work))
    print(estimated, truth)
    for cause, share in estimated.items():
        assert share == pytest.approx(getattr(truth, f"{cause}_s"), abs=0.03), cause
    assert sum(estimated.values()) == pytest.approx(truth.total_s, abs=0.03)


def test_a_payload_takes_under_a_millisecond():
    telemetry = engine(**SYNC).scheduler.telemetry
    started = perf_counter()
    for _ in range(100):
        telemetry.totals.payload(telemetry.counters(), telemetry.gauges())
    assert (perf_counter() - started) / 100 < 1e-3
