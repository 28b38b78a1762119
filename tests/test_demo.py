"""The demo's parts that need no server: workload, counts, comparison, and the tiny model."""

import json
import socket
import subprocess
import time
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from bench import demo_workload
from bench.decode_heavy import imbalance
from bench.demo_report import decode_counts
from bench.greedy_check import first_difference, greedy_requests
from bench.live_server import free_port, stop_group, thread_binding
from bench.tiny_model import make


def test_synthetic_arrivals_repeat_and_keep_the_marginals() -> None:
    arrivals = demo_workload.synthetic(rate=50.0, duration_s=100.0, shrink=4.0, seed=1)
    assert arrivals == demo_workload.synthetic(rate=50.0, duration_s=100.0, shrink=4.0, seed=1)
    assert arrivals != demo_workload.synthetic(rate=50.0, duration_s=100.0, shrink=4.0, seed=2)
    assert len(arrivals) == 5000
    assert arrivals[-1].time_s == pytest.approx(100.0, rel=0.05)
    prompts = sorted(arrival.prompt_tokens for arrival in arrivals)
    outputs = sorted(arrival.output_tokens for arrival in arrivals)
    assert prompts[2500] == pytest.approx(1020 / 4, rel=0.05)
    assert outputs[2500] == pytest.approx(129 / 4, rel=0.1)


def test_a_trace_is_replayed_in_its_own_rhythm_at_the_asked_rate(tmp_path: Path) -> None:
    azure = tmp_path / "azure.csv"
    azure.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:46.6805900,374,44\n"
        "2023-11-16 18:15:47.6805900,396,109\n"
        "2023-11-16 18:15:50.6805900,9000,1\n"
    )
    mooncake = tmp_path / "mooncake.jsonl"
    rows = [(0, 374, 44), (1000, 396, 109), (4000, 9000, 1)]
    mooncake.write_text(
        "".join(
            json.dumps({"timestamp": t, "input_length": p, "output_length": o}) + "\n"
            for t, p, o in rows
        )
    )
    arrivals = demo_workload.from_trace(azure, rate=0.5, duration_s=6.0, shrink=2.0)
    assert arrivals == demo_workload.from_trace(mooncake, rate=0.5, duration_s=6.0, shrink=2.0)
    assert [arrival.time_s for arrival in arrivals] == pytest.approx([0.0, 1.5, 6.0])
    assert [arrival.prompt_tokens for arrival in arrivals] == [187, 198, 2048]
    assert [arrival.output_tokens for arrival in arrivals] == [22, 54, 2]


def test_a_trace_without_a_clock_is_refused_by_name(tmp_path: Path) -> None:
    trace = tmp_path / "one.jsonl"
    trace.write_text('{"timestamp": 5, "input_length": 3, "output_length": 3}\n')
    with pytest.raises(ValueError, match=r"--trace .*one\.jsonl"):
        demo_workload.from_trace(trace, rate=1.0, duration_s=10.0, shrink=1.0)


def test_no_two_prompts_of_the_workload_share_a_block(tmp_path: Path) -> None:
    arrivals = demo_workload.synthetic(rate=5.0, duration_s=4.0, shrink=4.0, seed=0)
    file = tmp_path / "workload.jsonl"
    demo_workload.write(arrivals, file)
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    hashes = [number for row in rows for number in row["hash_ids"]]
    assert len(set(hashes)) == len(hashes)
    assert [row["input_length"] for row in rows] == [a.prompt_tokens for a in arrivals]
    assert all(len(row["hash_ids"]) * 16 >= row["input_length"] for row in rows)


def test_decode_counts_compare_within_rounds_and_skip_idle_ones() -> None:
    even = [{"decodes": n} for n in (4, 4, 4, 4, 8, 8, 8, 8)]
    lumpy = [{"decodes": n} for n in (8, 8, 0, 0, 0, 0, 0, 1)]
    assert decode_counts(even, pp_size=4) == (6.0, 0.0, 0.0)
    assert decode_counts(lumpy, pp_size=4) == (4.0, 4.0, 8.0)


def test_the_first_difference_is_named() -> None:
    assert first_difference([[1, 2], [3]], [[1, 2], [3]]) is None
    assert "request 1, token 0" in str(first_difference([[1, 2], [3]], [[1, 2], [4]]))
    assert "request 0, token 1" in str(first_difference([[1]], [[1, 2]]))


def test_greedy_requests_repeat() -> None:
    assert greedy_requests(32) == greedy_requests(32)
    assert len({request.prompt for request in greedy_requests(32)}) == 32


@pytest.mark.parametrize(
    ("workers", "cores", "binding"),
    [
        (4, [0, 1], "0|0|1|1"),
        (2, [0, 1], "0|1"),
        (4, [3], "3|3|3|3"),
        (2, [0, 1, 2, 3, 4], "0,1|2,3"),
    ],
)
def test_every_worker_gets_a_core(workers: int, cores: list[int], binding: str) -> None:
    assert thread_binding(workers, cores) == binding


def test_the_tiny_model_is_the_same_each_time_and_made_once(tmp_path: Path) -> None:
    first, second = make(tmp_path / "a"), make(tmp_path / "b")
    weights = first / "model.safetensors"
    assert weights.read_bytes() == (second / "model.safetensors").read_bytes()
    made = weights.stat().st_mtime_ns
    assert make(first) == first
    assert weights.stat().st_mtime_ns == made


def test_the_tiny_model_tokenizer_keeps_every_byte(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_file(str(make(tmp_path) / "tokenizer.json"))
    text = "größer\n\x00 日本"
    ids = tokenizer.encode(text).ids
    assert len(ids) == len(text.encode())
    assert tokenizer.decode(ids) == text


def test_a_stopped_group_leaves_no_child() -> None:
    process = subprocess.Popen(
        ["bash", "-c", "trap '' TERM; sleep 60 & echo $!; wait"],
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    assert process.stdout is not None
    child = int(process.stdout.readline())
    stop_group(process, limit_s=0.2)
    status = Path(f"/proc/{child}/status")
    deadline = time.monotonic() + 10.0
    # Killed, the child may stay as a zombie until its new parent looks.
    while status.exists() and "State:\tZ" not in status.read_text():
        assert time.monotonic() < deadline, "the child is still running"
        time.sleep(0.01)


def test_a_free_port_can_be_bound() -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", free_port()))


def test_imbalance_counts_the_cohorts_that_carry_nothing() -> None:
    def rows(*decodes: int) -> list[dict[str, int]]:
        running = sum(decodes)
        return [{"decodes": d, "running": running, "prefills": 0} for d in decodes if d]

    assert imbalance(rows(5, 5, 5, 5), 4) == pytest.approx(0.0)
    assert imbalance(rows(20, 0, 0, 0), 4) == pytest.approx(3.0**0.5)
    assert imbalance(rows(8, 8, 0, 0), 4) == pytest.approx(1.0)
    assert imbalance(rows(7, 5, 3, 1), 4) == pytest.approx(5.0**0.5 / 4.0)
    assert imbalance([{"decodes": 3, "running": 4, "prefills": 1}], 4) == 0.0
