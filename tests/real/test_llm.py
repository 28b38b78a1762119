"""`vllm.LLM` on the CPU at PP=2, its engine core in a spawned process."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench.greedy_check import first_difference
from bench.live_server import ROOT, cpu_environment, stop_group, tail
from tests.real.real_runs import Reference, check_rows, combinations, is_for_lone_prompts

pytestmark = pytest.mark.real_vllm
SCRIPT = Path(__file__).parent / "llm_script.py"
LIMIT_S = 540


def test_every_policy_gives_the_tokens_of_stock(
    model: Path, reference: Reference, switching: dict[str, str], tmp_path: Path
) -> None:
    requests, sent = tmp_path / "requests.json", [*reference.requests, reference.lone]
    requests.write_text(
        json.dumps([{"prompt": r.prompt, "max_tokens": r.max_tokens} for r in sent])
    )
    log, results = tmp_path / "llm.log", tmp_path / "results.json"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, str(SCRIPT), str(model), str(requests), str(results)],
            cwd=ROOT,
            env=cpu_environment(2) | switching,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = process.wait(LIMIT_S)
        finally:
            stop_group(process)
    assert code == 0, tail(log)
    tokens = json.loads(results.read_text())
    for name, _ in combinations():
        lone = reference.lone_tokens if is_for_lone_prompts(name) else []
        assert first_difference(tokens[name], [*reference.tokens, *lone]) is None, name
    check_rows(Path(switching["BENCH_STEPS"]))
    assert "ppbalance failed" not in log.read_text(errors="replace")
