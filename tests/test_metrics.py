"""The series: from sums over payloads to pages, with any number of processes in between."""

import json
import os
import re
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

pytest.importorskip("prometheus_client")

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from bench.live_server import free_port
from vllm_ppbalance.config import Settings
from vllm_ppbalance.controller import Controller
from vllm_ppbalance.metrics import MAX_REASONS, SERIES, Totals
from vllm_ppbalance.metrics_page import MetricsPage, serve_page
from vllm_ppbalance.telemetry import Telemetry

ROOT = Path(__file__).parent.parent
NO_BUBBLES = {"bubble_seconds": {}, "work_seconds": {"": 0.0}}


def payload(totals):
    return totals.payload(totals.counters() | NO_BUBBLES, {})


def samples(text):
    """Value of each sample on a page, `name{label=value,...}` with the labels in order."""
    return {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_counters_travel_as_what_was_added_since_the_last_payload():
    totals = Totals()
    totals.steps, totals.prefill_tokens = 3, 100
    totals.decided("grow")
    assert payload(totals)["steps"] == {"": 3}
    totals.steps += 2
    totals.decided("grow")
    totals.decided("shrink")
    second = payload(totals)
    assert second["steps"] == {"": 2}
    assert second["tokens"] == {"prefill": 0, "decode": 0}
    assert second["decisions"] == {"grow": 1, "shrink": 1}


def test_means_are_of_the_time_since_the_last_payload():
    totals = Totals()
    totals.spread, totals.rounds = 40, 10
    assert payload(totals)["decode_spread"] == {"": 4.0}
    totals.spread, totals.rounds = 42, 14
    assert payload(totals)["decode_spread"] == {"": 0.5}
    assert "decode_spread" not in payload(totals)


def test_a_policy_that_invents_reasons_without_end_keeps_the_page_small():
    totals = Totals()
    for number in range(1000):
        totals.decided(f"reason{number}")
    assert len(totals.reasons) == MAX_REASONS + 1
    assert totals.reasons["other"] == 1000 - MAX_REASONS


def test_a_page_adds_counters_up_and_shows_the_newest_gauge_by_engine():
    registry = CollectorRegistry()
    page = MetricsPage(registry)
    page.update("m", "0", {"steps": {"": 3.0}, "token_budget": {"": 128.0}})
    page.update("m", "1", {"steps": {"": 5.0}, "fallback": {"stock": 1.0}})
    page.update("m", "0", {"steps": {"": 4.0}, "token_budget": {"": 256.0}, "newer": {"": 1.0}})
    shown = samples(generate_latest(registry).decode())
    assert shown["ppbalance_steps_total", ("engine", "0"), ("model_name", "m")] == 7.0
    assert shown["ppbalance_steps_total", ("engine", "1"), ("model_name", "m")] == 5.0
    assert shown["ppbalance_token_budget", ("engine", "0"), ("model_name", "m")] == 256.0
    labels = (("engine", "1"), ("kind", "stock"), ("model_name", "m"))
    assert shown["ppbalance_fallback", *labels] == 1.0


def test_several_api_servers_show_one_sum(tmp_path):
    """prometheus_client's files, as vLLM sets them up for more than one API server."""
    script = (
        "from vllm_ppbalance.metrics_page import shared_page\n"
        "import sys\n"
        "shared_page().update('m', '0', {'steps': {'': float(sys.argv[1])},"
        " 'token_budget': {'': float(sys.argv[1])}})\n"
    )
    environment = os.environ | {"PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
    for value in ("3", "4"):
        command = [sys.executable, "-c", script, value]
        subprocess.run(command, check=True, env=environment, cwd=ROOT, timeout=60)
    from prometheus_client import multiprocess

    registry = CollectorRegistry()
    multiprocess.MultiProcessCollector(registry, path=str(tmp_path))
    shown = samples(generate_latest(registry).decode())
    assert shown["ppbalance_steps_total", ("engine", "0"), ("model_name", "m")] == 7.0
    assert shown["ppbalance_token_budget", ("engine", "0"), ("model_name", "m")] == 4.0


def test_a_port_of_its_own_shows_the_sums_and_a_taken_port_is_no_failure(caplog):
    telemetry = Telemetry(Controller(Settings(), 2, "step"), max_budget=2048)
    telemetry.totals.steps = 9
    telemetry.attach({}, failed=True, idle=True)
    port = free_port()
    server = serve_page(telemetry, port)
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
            shown = samples(answer.read().decode())
        assert serve_page(telemetry, port) is None
    finally:
        server.shutdown()
        server.server_close()
    assert shown["ppbalance_steps_total",] == 9.0
    assert shown["ppbalance_token_budget",] == 2048.0
    assert shown["ppbalance_fallback", ("kind", "stock")] == 1.0
    assert [r.levelname for r in caplog.records].count("WARNING") == 1


def test_every_sum_is_a_series_and_no_series_is_without_a_source():
    """But for what only a cost model or a policy with a target brings."""
    telemetry = Telemetry(Controller(Settings(), 2, "step"), max_budget=2048)
    telemetry.totals.rounds = 1
    telemetry.bubbles.work_s = 1.0
    part = telemetry.totals.payload(telemetry.counters(), telemetry.gauges())
    named = {series.name for series in SERIES}
    assert set(part) <= named
    assert named - set(part) == {"target_stage_seconds", "prediction_error_ratio"}


def dashboard_expressions(node):
    if isinstance(node, dict):
        for key, value in node.items():
            if key in ("expr", "definition", "query") and isinstance(value, str):
                yield value
            else:
                yield from dashboard_expressions(value)
    elif isinstance(node, list):
        for item in node:
            yield from dashboard_expressions(item)


def test_the_dashboard_shows_every_exported_series_and_no_other():
    text = (ROOT / "configs" / "grafana_dashboard.json").read_text(encoding="utf-8")
    used = set()
    for expression in dashboard_expressions(json.loads(text)):
        used |= set(re.findall(r"\bppbalance_\w+", expression))
    assert used == {series.exported for series in SERIES}


def test_every_panel_asks_with_all_its_variables_filled_in():
    from bench.dashboard_picture import DASHBOARD, legend, query

    expressions = list(dashboard_expressions(json.loads(DASHBOARD.read_text())["panels"]))
    assert len(expressions) > 20
    assert not any("$" in query(expression, "20s") for expression in expressions)
    assert legend("{{kind}} tokens/s {{engine}}", {"kind": "decode", "engine": "1"}) == (
        "decode tokens/s 1"
    )
