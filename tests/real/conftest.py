"""One tiny model and one stock vLLM run, whose tokens every other real run must repeat."""

from pathlib import Path

import pytest

from bench.greedy_check import complete_all, greedy_requests
from bench.live_server import LiveServer
from bench.tiny_model import make
from tests.real.real_runs import Reference, lone_request

NUM_REQUESTS = 32
LONE_PROMPT_TOKENS = 1200


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="session")
def reference(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """Stock vLLM at PP=4, the plugin installed but not asked for."""
    requests = greedy_requests(NUM_REQUESTS)
    lone = lone_request(LONE_PROMPT_TOKENS)
    log = tmp_path_factory.mktemp("stock") / "server.log"
    with LiveServer(model, 4, log) as server:
        tokens = complete_all(server.url, str(model), requests)
        lone_tokens = complete_all(server.url, str(model), [lone])
    return Reference(requests, tokens, lone, lone_tokens, log.read_text(errors="replace"))


@pytest.fixture
def switching(tmp_path: Path) -> dict[str, str]:
    """Environment of an engine that runs the switching scheduler."""
    return {
        "SWITCH_FILE": str(tmp_path / "switch.json"),
        "BENCH_STEPS": str(tmp_path / "steps.jsonl"),
        "PPBALANCE_PROFILING__MODE": "off",  # its prompts would be among the rows
    }
