"""`vllm serve` on the CPU, pipeline parallel, with and without the plugin."""

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from bench.greedy_check import complete_all, first_difference
from bench.live_server import ROOT, LiveServer
from bench.served_record import load
from bench.workloads import WorkloadSpec, build, workload_hash
from tests.real.real_runs import (
    Reference,
    check_rows,
    combinations,
    is_for_lone_prompts,
    switch_to,
)
from vllm_ppbalance.top import Page, read_page

pytestmark = pytest.mark.real_vllm


def test_an_installed_plugin_changes_nothing_without_the_flag(reference: Reference) -> None:
    assert "ppbalance" not in reference.log
    assert "Using custom scheduler class" not in reference.log


def test_the_reference_answers_differ_from_each_other(reference: Reference) -> None:
    """Else identical outputs would prove little."""
    assert len({tuple(tokens[:8]) for tokens in reference.tokens}) == len(reference.tokens)
    assert all(
        len(tokens) == request.max_tokens
        for tokens, request in zip(reference.tokens, reference.requests, strict=True)
    )


@dataclass(frozen=True)
class Flagged:
    """What a server with the flag alone answered, and what `bench serve` made of it."""

    tokens: list[list[int]]
    page: Page
    log: str
    said: str
    record: dict[str, Any]


@pytest.fixture(scope="module")
def flagged(model: Path, reference: Reference, tmp_path_factory: pytest.TempPathFactory) -> Flagged:
    folder = tmp_path_factory.mktemp("flagged")
    log, out = folder / "server.log", folder / "ours.jsonl"
    # The second variable adds the endpoint that empties the prefix cache.
    environment = {"PPBALANCE": "1", "VLLM_SERVER_DEV_MODE": "1"}
    with LiveServer(model, 2, log, environment=environment) as server:
        tokens = complete_all(server.url, str(model), reference.requests)
        page = read_page(server.url)
        done = subprocess.run(
            [
                *(sys.executable, "-m", "bench", "serve", "--base-url", server.url),
                *("--label", "ours", "--workload", "random", "--rate", "8", "--duration", "2"),
                *("--prompt-range", "16", "600", "--output-range", "2", "12", "--warmup", "0"),
                *("--slo-ttft", "60", "--slo-tpot", "30", "--out", str(out)),
            ],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=240,
        )
    assert done.returncode == 0, done.stderr
    (record,) = load(out)
    said = done.stdout + done.stderr
    return Flagged(tokens, page, log.read_text(errors="replace"), said, record)


def test_the_flag_alone_activates_it_and_tokens_stay_the_same(
    reference: Reference, flagged: Flagged
) -> None:
    assert first_difference(flagged.tokens, reference.tokens) is None
    prompts = sum(len(request.prompt) for request in reference.requests)
    page = flagged.page
    assert page.value("ppbalance_tokens_total", kind="prefill", engine="0") == prompts
    assert page.value("ppbalance_slo_ttft_seconds", engine="0") == 2.0
    assert "ppbalance is active: chunk balanced, rebalance auto, 2 stages" in flagged.log
    assert "ppbalance failed" not in flagged.log


def test_vllms_own_client_sends_the_simulators_requests_at_their_times(flagged: Flagged) -> None:
    workload = WorkloadSpec(
        "random", rate=8.0, window=(0.0, 2.0), prompt_range=(16, 600), output_range=(2, 12)
    )
    requests, raw = build(workload), flagged.record["raw"]
    assert flagged.record["workload"]["sha256"] == workload_hash(requests)
    assert raw["input_lens"] == [r.prompt_tokens for r in requests]
    assert raw["output_lens"] == [r.output_tokens for r in requests]
    assert raw["errors"] == [""] * len(requests)
    assert all(len(gaps) < r.output_tokens for gaps, r in zip(raw["itls"], requests, strict=True))
    # Spread over time, where without time stamps all would go at once. A busy machine may be late.
    sent_s = [start - raw["start_times"][0] for start in raw["start_times"]]
    assert sent_s == sorted(sent_s)
    assert sent_s[-1] > 0.5 * (requests[-1].arrival_s - requests[0].arrival_s)
    assert flagged.record["measures"]["slo_attainment"] == 1.0
    assert "random" in flagged.said
    assert "not flushed" not in flagged.said
    assert "Resetting prefix cache" in flagged.log


def test_every_policy_gives_the_tokens_of_stock_and_a_named_scheduler_wins(
    model: Path, reference: Reference, switching: dict[str, str], tmp_path: Path
) -> None:
    switch = Path(switching["SWITCH_FILE"])
    switch_to(switch, *next(combinations()))
    log = tmp_path / "server.log"
    named = ("--scheduler-cls", "tests.real.switching.SwitchingScheduler")
    with LiveServer(model, 4, log, named, switching | {"PPBALANCE": "1"}) as server:
        for name, settings in combinations():
            switch_to(switch, name, settings)
            if is_for_lone_prompts(name):
                tokens = complete_all(server.url, str(model), [reference.lone])
                assert first_difference(tokens, reference.lone_tokens) is None, name
            tokens = complete_all(server.url, str(model), reference.requests)
            assert first_difference(tokens, reference.tokens) is None, name
    # Only the scheduler named on the command line writes these rows.
    check_rows(Path(switching["BENCH_STEPS"]))
    assert "ppbalance failed" not in log.read_text(errors="replace")
