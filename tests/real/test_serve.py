"""`vllm serve` on the CPU, pipeline parallel, with and without the plugin."""

from pathlib import Path

import pytest

from bench.greedy_check import complete_all, first_difference
from bench.live_server import LiveServer
from tests.real.real_runs import (
    Reference,
    check_rows,
    combinations,
    is_for_lone_prompts,
    switch_to,
)
from vllm_ppbalance.top import read_page

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


def test_the_flag_alone_activates_it_and_tokens_stay_the_same(
    model: Path, reference: Reference, tmp_path: Path
) -> None:
    log = tmp_path / "server.log"
    with LiveServer(model, 2, log, environment={"PPBALANCE": "1"}) as server:
        tokens = complete_all(server.url, str(model), reference.requests)
        page = read_page(server.url)
    assert first_difference(tokens, reference.tokens) is None
    prompts = sum(len(request.prompt) for request in reference.requests)
    assert page.value("ppbalance_tokens_total", kind="prefill", engine="0") == prompts
    assert page.value("ppbalance_slo_ttft_seconds", engine="0") == 2.0
    text = log.read_text(errors="replace")
    assert "ppbalance is active: chunk balanced, rebalance even_share, 2 stages" in text
    assert "ppbalance failed" not in text


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
