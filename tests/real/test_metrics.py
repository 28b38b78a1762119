"""One real server with two API servers: its own /metrics page, the step log, and the live view."""

import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from bench.__main__ import main as bench
from bench.greedy_check import complete_all, greedy_requests
from bench.live_server import ROOT, LiveServer, free_port
from bench.step_log import read_step_log
from vllm_ppbalance.metrics import SERIES
from vllm_ppbalance.top import Page, read_page

pytestmark = pytest.mark.real_vllm
REQUESTS = greedy_requests(32, seed=1)
# Only once the cost model is trusted, which so short a load need not reach.
FROM_THE_MODEL = {"ppbalance_target_stage_seconds", "ppbalance_prediction_error_ratio"}


@dataclass(frozen=True)
class Served:
    """What a served workload left behind."""

    pages: list[Page]  # several looks: either API server may answer
    own_page: Page
    top: str
    log: str
    trace: Path


@pytest.fixture(scope="module")
def served(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Served:
    folder = tmp_path_factory.mktemp("metrics")
    trace, port = folder / "steps.jsonl", free_port()
    environment = {
        "PPBALANCE": "1",
        "PPBALANCE_TRACE": str(trace),
        "PPBALANCE_METRICS_PORT": str(port),
    }
    log = folder / "server.log"
    with LiveServer(model, 2, log, ("--api-server-count", "2"), environment) as server:
        complete_all(server.url, str(model), REQUESTS)
        pages = [read_page(server.url) for _ in range(4)]
        own_page = read_page(f"http://127.0.0.1:{port}")
        top = subprocess.run(
            [sys.executable, "-m", "vllm_ppbalance", "top", "--url", server.url, "--once"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        time.sleep(1.0)  # the step log is written several times a second
    return Served(pages, own_page, top.stdout, log.read_text(errors="replace"), trace)


def test_every_series_is_on_vllms_own_page(served: Served) -> None:
    names = {name for name, _ in served.pages[0].samples}
    assert {series.exported for series in SERIES} - names <= FROM_THE_MODEL
    assert "ppbalance failed" not in served.log
    assert "step log failed" not in served.log


def test_the_sums_are_those_of_the_requests_whichever_api_server_answers(served: Served) -> None:
    prompts = sum(len(request.prompt) for request in REQUESTS)
    decodes = sum(request.max_tokens - 1 for request in REQUESTS)
    for page in (*served.pages, served.own_page):
        assert page.value("ppbalance_tokens_total", kind="prefill") == prompts
        assert page.value("ppbalance_tokens_total", kind="decode") == decodes
    page = served.pages[0]
    assert page.engines() == ["0"]
    assert set(page.by("ppbalance_cohort_decodes", "cohort")) == {"0", "1"}
    steps = page.value("ppbalance_steps_total")
    assert sum(page.by("ppbalance_decisions_total", "reason").values()) == steps
    idle_s = sum(page.by("ppbalance_bubble_seconds_total", "cause").values())
    assert 0.0 < idle_s < page.value("ppbalance_work_seconds_total")
    # vLLM's own series, the live view's TTFT and TPOT, are where they were.
    assert page.value("vllm:time_to_first_token_seconds_count") == len(REQUESTS)
    assert page.value("vllm:request_time_per_output_token_seconds_count") == len(REQUESTS)


def test_the_live_view_shows_the_server(served: Served) -> None:
    assert "cohort" in served.top
    assert "tokens" in served.top
    assert "of 2000.0 ms" in served.top
    assert "bubbles" in served.top


def test_the_step_log_holds_every_micro_batch_and_can_be_explained(
    served: Served, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    log = read_step_log(served.trace)
    assert len(log.batches) == served.pages[0].value("ppbalance_steps_total")
    assert log.batches[-1].first_tokens == len(REQUESTS)
    assert bench(["explain", str(served.trace)]) == 0
    assert "estimated idle stage time" in capsys.readouterr().out
    assert bench(["trace", str(served.trace), "--out", str(tmp_path / "trace.json")]) == 0


def test_the_start_is_told_in_one_line_with_its_sources(served: Served) -> None:
    lines = [line for line in served.log.splitlines() if "ppbalance is active" in line]
    assert len(lines) == 1
    assert "chunk balanced, rebalance auto, 2 stages" in lines[0]
    assert "PPBALANCE_TRACE" in lines[0]
    assert "stage times: " in lines[0]
