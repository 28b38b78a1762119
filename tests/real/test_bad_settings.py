"""A wrong setting stops `vllm serve` at start: one readable line, no engine, a failing exit."""

from dataclasses import dataclass
from pathlib import Path

import pytest

from bench.live_server import LiveServer

pytestmark = pytest.mark.real_vllm
LIMIT_S = 300.0  # three at once, each importing all of vLLM


@dataclass(frozen=True)
class Case:
    arguments: tuple[str, ...]
    environment: dict[str, str]
    words: tuple[str, ...]  # knob, value, and bound


CASES = {
    "unknown strategy": Case(
        (),
        {"PPBALANCE": "1", "PPBALANCE_CHUNK__STRATEGY": "foo"},
        ("chunk.strategy", "'foo'", "'fixed'", "'greedy'", "PPBALANCE_CHUNK__STRATEGY"),
    ),
    "unknown knob": Case(
        ("--additional-config", '{"ppbalance": {"slo": -1}}'),
        {"PPBALANCE": "1"},
        ("slo", "-1", "no such setting", "slo_ttft", "--additional-config"),
    ),
    "out of bounds": Case(
        (
            *("--scheduler-cls", "vllm_ppbalance.Scheduler"),
            *("--additional-config", '{"ppbalance": {"slo_ttft": -1}}'),
        ),
        {},
        ("slo_ttft", "-1", "greater than 0", "--additional-config"),
    ),
}


@pytest.fixture(scope="module")
def ended(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, str]]:
    """Exit code and log of every case, run side by side."""
    folder = tmp_path_factory.mktemp("bad")
    servers = {
        name: LiveServer(model, 2, folder / f"{i}.log", case.arguments, case.environment)
        for i, (name, case) in enumerate(CASES.items())
    }
    try:
        processes = {name: server.spawn() for name, server in servers.items()}
        codes = {name: process.wait(LIMIT_S) for name, process in processes.items()}
    finally:
        for server in servers.values():
            server.stop()
    return {
        name: (codes[name], server.log.read_text(errors="replace"))
        for name, server in servers.items()
    }


@pytest.mark.parametrize("name", CASES)
def test_a_wrong_setting_stops_the_server_at_start(
    ended: dict[str, tuple[int, str]], name: str
) -> None:
    code, log = ended[name]
    messages = [line for line in log.splitlines() if "ppbalance" in line and "wrong" in line]
    assert code != 0
    assert len(messages) == 1, log
    assert all(word in messages[0] for word in CASES[name].words), messages[0]
    assert "Traceback" not in log
    assert "EngineCore" not in log
