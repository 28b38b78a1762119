"""Runs vLLM's own load generator, `vllm bench serve`, as a process of its own."""

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from subprocess import Popen
from typing import Any

from bench.live_server import ROOT, stop_group, tail

POLL_S = 0.5


def replay_command(
    base_url: str, model: str, trace: Path, count: int, block_tokens: int, result: Path
) -> list[str]:
    """Sends `count` requests of a timed trace at their own times, greedy, and saves `result`.

    The dataset makes the client ask for exactly the trace's output lengths (`ignore_eos`).
    """
    return [
        *(sys.executable, "-m", "bench.vllm_cli", "bench", "serve"),
        *("--model", model, "--base-url", base_url),
        *("--dataset-name", "timed_trace", "--dataset-path", str(trace)),
        *("--timed-trace-chunk-hash-size", str(block_tokens)),
        *("--num-prompts", str(count), "--temperature", "0"),
        *("--save-result", "--result-dir", str(result.parent), "--result-filename", result.name),
    ]


@contextmanager
def client(
    command: Sequence[str], log: Path, environment: Mapping[str, str] | None = None
) -> "Iterator[Popen[bytes]]":
    """The client's process, started; it is ended with all of its own when the block is left."""
    inherited = dict(os.environ) if environment is None else dict(environment)
    path = [str(ROOT), *filter(None, [inherited.get("PYTHONPATH")])]
    own = {
        "PYTHONPATH": os.pathsep.join(path),
        # It draws prompts by Python's hash: fixed, so that every server gets the same tokens.
        "PYTHONHASHSEED": "0",
        "VLLM_LOGGING_LEVEL": "ERROR",
    }
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as output:
        process = Popen(
            command,
            env=inherited | own,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        stop_group(process)


def wait_for(
    process: "Popen[bytes]",
    log: Path,
    limit_s: float,
    answered: Callable[[int], None],
) -> None:
    """Waits for the client's end, telling how many requests are answered.

    Raises RuntimeError with the end of its log where it fails or takes longer than `limit_s`.
    """
    deadline = time.monotonic() + limit_s
    while process.poll() is None:
        if time.monotonic() > deadline:
            raise RuntimeError(f"vllm bench serve: not done after {limit_s:.0f} s, {log}")
        answered(_answered(log))
        time.sleep(POLL_S)
    if process.poll() != 0:
        raise RuntimeError(f"vllm bench serve: code {process.poll()}, {log}:\n{tail(log)}")


def read_result(path: Path) -> dict[str, Any]:
    """What the client saved."""
    result: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return result


def _answered(log: Path) -> int:
    counts = re.findall(r"(\d+)/\d+ \[", tail(log, 1))
    return int(counts[-1]) if counts else 0
