"""`bench serve` without vLLM: cells, traces, records, resuming, and what it says of bad input."""

import json
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench import serve_run, served_record
from bench.__main__ import main as bench
from bench.compare import by_workload, load_results, rows
from bench.measures import Slo
from bench.openai_server import ServedModel, flush_prefix_cache, look_at
from bench.serve_cells import Cell, fitting, key_of, make_cells, parse_rates
from bench.serve_table_page import write_page
from bench.served_record import judged, load, request_records, sent_late
from bench.served_table import goodputs
from bench.sim_world import build_requests
from bench.timed_trace import write_trace
from bench.vllm_client import wait_for
from bench.workloads import BenchRequest, WorkloadSpec
from tests.openai_stub import Stub, openai_stub

SHORT = {"prompt_range": [16, 64], "output_range": [2, 8]}
SERVER = ServedModel("http://localhost:1", "m", 4096, "0.32.0")


@pytest.fixture
def server() -> Iterator[Stub]:
    with openai_stub() as stub:
        yield stub


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Puts a stub in the client's place; its "fail" is what the stub is told, "trace" the last."""
    stub = Path(__file__).parent / "client_stub.py"
    told = {"fail": "0", "trace": "", "runs": ""}

    def command(url: str, model: str, trace: Path, count: int, block: int, result: Path):
        told["trace"] = trace.read_text()
        told["runs"] += "x"
        return [sys.executable, str(stub), str(trace), str(result), told["fail"]]

    monkeypatch.setattr(serve_run, "replay_command", command)
    monkeypatch.setattr(serve_run, "_options", lambda _tokenizer: [])
    return told


def serve(server: Stub, out: Path, *words: str) -> int:
    return bench(
        [
            *("serve", "--base-url", server.url, "--label", "ours", "--workload", "random"),
            *("--prompt-range", "16", "64", "--output-range", "2", "8", "--duration", "4"),
            *("--out", str(out), "--warmup", "0", *words),
        ]
    )


def cell(**fields: object) -> Cell:
    plain = {"rate": 2.0, "num_prompts": 6, **SHORT, **fields}
    return make_cells(["random"], plain, [], [0], 60.0, None)[0]


def test_the_end_of_a_range_of_rates_is_left_out() -> None:
    assert parse_rates("1,11,1") == [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]
    assert parse_rates("0.5,1.4,0.3") == [0.5, 0.8, 1.1]
    assert parse_rates("2,2.5,1") == [2]


@pytest.mark.parametrize("text", ["1,11", "1,2,x", "5,1,1", "0,4,1", "1,5,0", "1,inf,1", "1,nan,1"])
def test_a_wrong_range_of_rates_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=f"--request-rate-range {text}"):
        parse_rates(text)


def test_cells_are_workloads_by_seeds_by_rates() -> None:
    cells = make_cells(["random", "cnn"], {}, [1.0, 3.0], [0, 7], 10.0, None)
    seen = [(c.workload.name, c.workload.seed, c.workload.rate) for c in cells]
    assert seen == [(n, s, r) for n in ("random", "cnn") for s in (0, 7) for r in (1.0, 3.0)]
    assert [len(c.requests) for c in cells] == [10, 30] * 4
    assert len({c.sha256 for c in cells}) == 8


def test_a_trace_keeps_its_own_times_and_is_sped_up(tmp_path: Path) -> None:
    trace = tmp_path / "azure.csv"
    trace.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:46.0000000,374,44\n"
        "2023-11-16 18:16:46.0000000,396,109\n"
        "2023-11-16 18:17:16.0000000,40,10\n"
    )
    fields = {"window": [30.0, 120.0], "speed": 3.0}
    (served,) = make_cells([f"azure_conv={trace}"], fields, [], [0], 1.0, None)
    assert [r.arrival_s for r in served.requests] == [10.0, 20.0]
    assert [r.prompt_tokens for r in served.requests] == [396, 40]


def test_a_served_run_has_the_requests_of_the_simulated_one() -> None:
    spec = WorkloadSpec("cnn", rate=3.0, window=(0.0, 20.0), seed=4)
    (served,) = make_cells(["cnn"], {"rate": 3.0, "window": [0.0, 20.0]}, [], [4], 1.0, None)
    assert list(served.requests) == build_requests(spec)


def test_the_trace_file_keeps_times_lengths_and_shared_blocks(tmp_path: Path) -> None:
    requests = [
        BenchRequest("a", 0.0, 1000, 5, hash_ids=(1, 2)),
        BenchRequest("b", 0.25, 520, 7, hash_ids=(1, 3)),
        BenchRequest("c", 1.5, 513, 9),
        BenchRequest("d", 1.5, 513, 9),
    ]

    def written(salt: int) -> list[dict[str, Any]]:
        write_trace(requests, tmp_path / "trace.jsonl", salt)
        return [json.loads(line) for line in (tmp_path / "trace.jsonl").read_text().splitlines()]

    lines = written(salt=5)
    assert [(r["timestamp"], r["input_length"], r["output_length"]) for r in lines] == [
        (0.0, 1000, 5),
        (0.25, 520, 7),
        (1.5, 513, 9),
        (1.5, 513, 9),
    ]
    a, b, c, d = (set(r["hash_ids"]) for r in lines)
    assert len(a & b) == 1
    assert not c & d
    assert not (a | b) & (c | d)
    # Another salt shares nothing with it.
    assert not (a | b | c | d) & {h for r in written(6) for h in r["hash_ids"]}


def test_what_the_server_cannot_hold_is_refused_or_left_out() -> None:
    short = replace(SERVER, max_model_len=40)
    one = cell()
    fits = [r for r in one.requests if r.prompt_tokens + r.output_tokens <= 40]
    assert 0 < len(fits) < len(one.requests)
    with pytest.raises(ValueError, match=r"max_model_len = 40; --skip-long"):
        fitting(one, short, skip_long=False)
    assert list(fitting(one, short, skip_long=True).requests) == fits
    assert fitting(one, replace(SERVER, max_model_len=None), skip_long=False) is one


def test_the_key_changes_with_all_that_determines_a_run() -> None:
    keys = [
        key_of(cell(), "ours", SERVER, None),
        key_of(cell(), "stock", SERVER, None),
        key_of(cell(), "ours", SERVER, "other"),
        key_of(cell(), "ours", replace(SERVER, model="n"), None),
        key_of(cell(), "ours", replace(SERVER, version="0.33.0"), None),
        key_of(cell(rate=2.5), "ours", SERVER, None),
        key_of(cell(num_prompts=5), "ours", SERVER, None),
    ]
    assert len(set(keys)) == len(keys)
    # Where the server listens changes nothing.
    assert key_of(cell(), "ours", replace(SERVER, url="http://other:2"), None) == keys[0]


def test_raw_arrays_become_records_and_failures_miss_the_slo() -> None:
    requests = [BenchRequest(f"r{i}", 0.5 * i, 10, 3) for i in range(4)]
    raw = {
        "arrivals": [0.0, 0.5, 1.0, 1.5],
        "start_times": [9.0, 9.5, 10.3, 10.5],
        "ttfts": [0.1, 0.1, 3.0, 0.0],
        "itls": [[0.1, 0.1], [0.1, 0.5], [0.1, 0.1], []],
        "latencies": [0.3, 0.7, 3.2, 0.0],
        "input_lens": [10, 10, 10, 10],
        "output_lens": [3, 3, 3, 0],
        "errors": ["", "", "", "refused"],
    }
    first, second, third = request_records(requests, raw)
    assert (first.ttft_s, first.tpot_s) == pytest.approx((0.1, 0.1))
    assert second.token_times_s == pytest.approx((9.6, 9.7, 10.2))
    assert third.e2el_s == pytest.approx(3.2)
    # One in time, one with slow tokens, one late, one failed.
    measures = judged({"raw": raw, "spec": {}}, Slo(2.0, 0.2))["measures"]
    assert measures["slo_attainment"] == 0.25
    assert (measures["num_requests"], measures["num_unfinished"]) == (3, 1)
    assert measures["meets_p90_rule"] is False
    assert measures["itl_s"]["p95"] == pytest.approx(0.4)
    assert judged({"raw": raw, "spec": {}}, Slo(4.0, 0.4))["measures"]["slo_attainment"] == 0.75
    assert sent_late(requests, raw)["max"] == pytest.approx(0.3)


def test_a_torn_line_is_left_out_and_the_next_one_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    served_record.append(path, {"key": "a", "measures": {}, "raw": {}})
    with path.open("a") as file:
        file.write('{"key": "b", "meas')
    served_record.append(path, {"key": "c", "measures": {}, "raw": {}})
    assert [record["key"] for record in load(path)] == ["a", "c"]
    path.write_text('{"some": "thing"}\n')
    with pytest.raises(ValueError, match=r"r\.jsonl:1: not the record"):
        load(path)


def test_a_sweep_is_sent_kept_and_not_sent_again(
    server: Stub, sent: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, figure = tmp_path / "ours.jsonl", tmp_path / "f.png"
    assert serve(server, out, "--request-rate-range", "1,4,1", "--figure", str(figure)) == 0
    assert sent["runs"] == "xxx"
    assert server.asked.count("POST /reset_prefix_cache") == 3
    assert figure.stat().st_size > 0
    records = load(out)
    assert [r["workload"]["num_requests"] for r in records] == [4, 8, 12]
    assert all(r["measures"]["slo_attainment"] == 1.0 for r in records)
    assert (
        "goodput at P90, ours on random: 3 req/s, the highest rate sent" in capsys.readouterr().out
    )
    # The same again, and a rate more: only that one is sent. A stricter target judges all anew.
    assert serve(server, out, "--request-rate-range", "1,5,1", "--slo-ttft", "0.4") == 0
    assert sent["runs"] == "xxxx"
    assert "goodput at P90, ours on random: under 1 req/s" in capsys.readouterr().out
    assert [line["timestamp"] for line in map(json.loads, sent["trace"].splitlines())] == [
        r.arrival_s for r in make_cells(["random"], SHORT, [4.0], [0], 4.0, None)[0].requests
    ]


def test_an_interrupted_sweep_keeps_what_is_done_and_goes_on(
    server: Stub,
    sent: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out, rates = tmp_path / "ours.jsonl", ("--request-rate-range", "1,4,1")

    def interrupted(*args: Any) -> None:
        if sent["runs"] == "xx":
            os.kill(os.getpid(), signal.SIGTERM)
        wait_for(*args)

    with monkeypatch.context() as patch:
        patch.setattr(serve_run, "wait_for", interrupted)
        assert serve(server, out, *rates) == 130
    assert "Interrupted: 1 of 3 runs are in" in capsys.readouterr().err
    assert [r["spec"]["workload"]["rate"] for r in load(out)] == [1.0]
    assert serve(server, out, *rates) == 0
    assert [r["spec"]["workload"]["rate"] for r in load(out)] == [1.0, 2.0, 3.0]
    assert sent["runs"] == "xxxx"


def test_a_run_with_failed_requests_is_told_and_sent_again(
    server: Stub, sent: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "ours.jsonl"
    sent["fail"] = "3"
    assert serve(server, out, "--rate", "2") == 1
    said = capsys.readouterr().err
    assert "3 of 8 requests failed, the first by: ServerDisconnectedError" in said
    sent["fail"] = "0"
    assert serve(server, out, "--rate", "2") == 0
    assert sent["runs"] == "xx"
    (record,) = load(out)
    assert record["measures"]["num_unfinished"] == 0


@pytest.mark.parametrize(
    ("fail", "words"), [("8", "no request was answered"), ("dies", "own words")]
)
def test_a_run_without_an_answer_is_not_kept(
    server: Stub, sent: dict[str, str], tmp_path: Path, fail: str, words: str
) -> None:
    sent["fail"] = fail
    with pytest.raises(SystemExit):
        serve(server, tmp_path / "ours.jsonl", "--rate", "2")
    assert load(tmp_path / "ours.jsonl") == []


def test_the_warm_up_has_other_prompts_and_comes_before_the_flush(
    server: Stub, sent: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[tuple[bool, list[dict[str, Any]]]] = []  # flushed before?, lines of the trace

    def noted(requests: Sequence[BenchRequest], path: Path, salt: int) -> None:
        write_trace(requests, path, salt)
        flushed = "POST /reset_prefix_cache" in server.asked
        written.append((flushed, [json.loads(line) for line in path.read_text().splitlines()]))

    monkeypatch.setattr(serve_run, "write_trace", noted)
    assert serve(server, tmp_path / "ours.jsonl", "--rate", "2", "--warmup", "3") == 0
    (flushed_first, warm_up), (flushed, run) = written
    assert (flushed_first, flushed) == (False, True)
    assert [line["timestamp"] for line in warm_up] == [0.0] * 3
    assert not {h for row in warm_up for h in row["hash_ids"]} & {
        h for row in run for h in row["hash_ids"]
    }
    (record,) = load(tmp_path / "ours.jsonl")
    assert record["workload"]["num_requests"] == len(run) == 8


def test_a_server_without_a_flush_is_told_once(
    server: Stub, sent: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    del server.answers["POST /reset_prefix_cache"]
    assert serve(server, tmp_path / "ours.jsonl", "--request-rate-range", "1,3,1") == 0
    said = " ".join(capsys.readouterr().err.split())
    assert (
        said.count("prefix cache is not flushed between runs: it has no /reset_prefix_cache") == 1
    )
    assert "VLLM_SERVER_DEV_MODE=1" in said


def test_a_server_that_holds_blocks_is_asked_again(
    server: Stub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bench.openai_server.FLUSH_PAUSE_S", 0.0)
    server.answers["POST /reset_prefix_cache"] = (200, {"success": False})
    assert "still holds blocks after 10 tries" in str(flush_prefix_cache(server.url))
    assert server.asked.count("POST /reset_prefix_cache") == 10


def test_the_server_tells_its_model_and_limit(server: Stub) -> None:
    assert look_at(f"{server.url}/v1/") == ServedModel(server.url, "m", 512, "0.32.0")
    del server.answers["GET /version"]
    server.answers["GET /v1/models"] = (200, {"data": [{"id": "gpt"}]})
    assert look_at(server.url) == ServedModel(server.url, "gpt")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--base-url", "localhost:80"], "--base-url localhost:80: must start with http://"),
        (["--model", "other"], "--model other: the server has: m"),
        (["--rate", "1", "--request-rate-range", "1,2,1"], "either --rate or"),
        (["--window", "0", "1", "--window-minutes", "0", "1"], "either --window or"),
        (["--label", "a/b"], "--label 'a/b'"),
        (["--warmup", "-1"], "--warmup -1: must be at least 0"),
        (["--duration", "0"], "--duration 0.0: must be at least"),
        (["--drain-limit", "-1"], "--drain-limit -1.0: must be at least 0"),
        (["--slo-ttft", "0"], "ttft_s = 0.0"),
        (["--seeds", "-1"], "--seeds -1: must be at least 0"),
        (["--workload", "rando"], "'rando' is unknown"),
        (["--workload", "azure_conv="], "names no file"),
        (["--workload", "azure_conv=none.csv"], "no such trace file"),
        (["--rate", "-1"], "rate = -1.0"),
        (["--prompt-range", "600", "700"], "max_model_len = 512"),
    ],
)
def test_a_bad_argument_is_told_in_one_line_and_nothing_is_sent(
    server: Stub,
    sent: dict[str, str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    message: str,
) -> None:
    rate = [] if "--rate" in words or "--request-rate-range" in words else ["--rate", "2"]
    with pytest.raises(SystemExit) as ended:
        serve(server, tmp_path / "ours.jsonl", *rate, *words)
    error = capsys.readouterr().err.strip()
    assert ended.value.code == 2
    assert message in error
    assert len(error.splitlines()) == 1
    assert not sent["runs"]


def test_served_runs_stand_side_by_side_with_ratios(
    server: Stub, sent: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for label in ("stock", "ours"):
        out = tmp_path / f"{label}.jsonl"
        assert serve(server, out, "--label", label, "--request-rate-range", "1,3,1") == 0
    results = load_results([tmp_path / "stock.jsonl", tmp_path / "ours.jsonl"])
    groups = by_workload(results)
    assert [[r["spec"]["policy"]["name"] for r in group] for group in groups] == [
        ["stock", "ours"]
    ] * 2
    slower = json.loads(json.dumps(groups[0][1]))
    slower["measures"]["ttft_s"]["p90"] = 1.0
    table = dict(rows([groups[0][0], slower], ratios=True))
    assert table["TTFT p90, ms"] == ["500.0", "1000.0 (2.00x)"]
    assert "bubble ratio" not in table
    assert bench(["compare", str(tmp_path), "--figure", str(tmp_path / "f.png")]) == 0
    assert "(1.00x)" in capsys.readouterr().out


def test_the_goodput_of_a_sweep_needs_every_seed() -> None:
    def run(rate: float, seed: int, met: bool) -> dict[str, object]:
        workload = {"name": "cnn", "rate": rate, "seed": seed}
        spec = {"policy": {"name": "ours"}, "workload": workload}
        return {"spec": spec, "measures": {"meets_p90_rule": met}}

    held = [run(1, 0, True), run(1, 1, True), run(2, 0, True), run(2, 1, False), run(3, 0, False)]
    assert goodputs(held) == ["goodput at P90, ours on cnn: 1 req/s"]
    assert goodputs(held[:2]) == []


def test_the_page_sets_served_beside_simulated_and_leaves_raw_arrays_out(tmp_path: Path) -> None:
    latency = {"p50": 0.1, "p90": 0.2}
    latencies = {"ttft_s": latency, "tpot_s": latency}
    measures = {"slo_attainment": 0.5, **latencies, "output_tok_per_s": 9.0}
    workload = {"num_requests": 20, "span_s": 10.0, "sha256": "a" * 64}
    shared = {"workload": workload, "measures": measures, "pipeline": {}, "key": "k"}
    spec = {
        "policy": {"name": "stock:512"},
        "workload": {"name": "cnn"},
        "slo": {"ttft_s": 2.0, "tpot_s": 0.2},
    }
    client = {"sent_late_s": {"p99": 0.0125}}
    record = {**shared, "spec": spec, "client": client, "versions": {"vllm": "1"}, "raw": [1]}
    other = {**shared, "measures": {**measures, "slo_attainment": 0.75}}
    write_page(tmp_path / "page.md", [record], [other], ["page.md", "--data", "/mine"])
    text = (tmp_path / "page.md").read_text()
    ttft, tpot = "0.10 / 0.10 | 0.20 / 0.20", "100 / 100 | 200 / 200"
    assert f"| stock:512 | 0.500 / 0.750 | {ttft} | {tpot} | 9 / 9 | 12 |" in text
    assert "2.00 req/s" in text
    assert "/mine" not in text
    (summary,) = json.loads((tmp_path / "page.json").read_text())
    assert "raw" not in summary["served"]
    assert summary["simulated"]["measures"]["slo_attainment"] == 0.75
