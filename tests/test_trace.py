"""The step log: written beside the engine, read by `bench trace` and `bench explain`."""

import json
import logging
import os
import threading
from dataclasses import fields
from pathlib import Path

import pytest

pytest.importorskip("vllm")

from bench.__main__ import main
from bench.engine_types import RequestSpec
from bench.explain import findings, summarise
from bench.step_log import LoggedMicroBatch, read_step_log, timeline_of
from tests.worlds import ASYNC, SYNC, batch_of, serve, settings
from vllm_ppbalance.trace import COLUMNS, TraceWriter

HEADER = {"pp_size": 2, "settings": {}}


def record(step):
    values = dict.fromkeys(COLUMNS, 0) | {"step": step, "prefills": ((3, 0),), "reason": "keep"}
    return tuple(values[name] for name in COLUMNS)


def logged_run(tmp_path, requests, additional=None, **options):
    """The log of a run, and the run."""
    path = tmp_path / "steps.jsonl"
    config = additional or settings(chunk="greedy", rebalance="even_share")
    config["ppbalance"]["trace"] = str(path)
    ran = serve(requests, additional_config=config, **options)
    ran.scheduler.telemetry.close()
    return read_step_log(path), ran


def test_a_line_is_what_the_reader_knows():
    assert [field.name for field in fields(LoggedMicroBatch)] == list(COLUMNS)


@pytest.mark.parametrize("mode", [SYNC, ASYNC], ids=["sync", "async-v2"])
def test_a_line_for_every_micro_batch(tmp_path, mode):
    log, ran = logged_run(tmp_path, batch_of(12, prompt=300, max_tokens=40), pp_size=2, **mode)
    busy = [step for step in ran.result.steps if step.shape.num_tokens]
    assert len(log.batches) == len(busy)
    assert [sorted(b.prefills) for b in log.batches] == [sorted(s.shape.prefills) for s in busy]
    assert [b.decodes for b in log.batches] == [s.shape.decodes for s in busy]
    # The simulator counts the decode itself among the tokens it reads.
    contexts = [b.decode_context + b.decodes for b in log.batches]
    assert contexts == [s.shape.decode_context for s in busy]
    assert sum(b.held for b in log.batches) == ran.scheduler.ppbalance.num_moves
    assert log.batches[-1].first_tokens == 12
    assert log.dropped == 0


@pytest.mark.parametrize("path", ["/proc/nowhere/steps.jsonl", "/dev/full"])
def test_a_path_that_cannot_be_written_is_one_warning_and_serving_goes_on(path, caplog):
    """A folder that is not there, and a disk that is full."""
    logging.getLogger("vllm").propagate = True
    config = settings(chunk="greedy", rebalance="even_share")
    config["ppbalance"]["trace"] = path
    ran = serve(batch_of(8, max_tokens=2000), additional_config=config, pp_size=2, **SYNC)
    telemetry = ran.scheduler.telemetry
    telemetry.close()
    assert all(request.finished for request in ran.result.requests.values())
    assert not telemetry.broken
    assert not ran.scheduler.ppbalance_failed
    assert telemetry.trace.dropped >= telemetry.totals.steps - 1
    warnings = {id(r) for r in caplog.records if "no more step log" in r.getMessage()}
    assert len(warnings) == 1


def test_a_disk_that_hangs_costs_records_and_no_time(tmp_path):
    """A pipe that nobody reads: the writer hangs in open()."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = TraceWriter(pipe, HEADER, capacity=10)
    for step in range(25):
        writer.append(record(step))
    assert writer.dropped == 15
    writer.close(limit_s=0.05)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)  # lets the thread end
    writer.close(limit_s=5.0)
    os.close(reader)


def test_dropped_records_are_told_in_the_file(tmp_path):
    path = tmp_path / "steps.jsonl"
    writer = TraceWriter(path, HEADER, capacity=0)
    writer.append(record(1))
    writer.close()
    assert json.loads(path.read_text().splitlines()[-1]) == {"dropped": 1}


def test_the_writer_ends_with_its_log(tmp_path):
    before = threading.active_count()
    writer = TraceWriter(tmp_path / "steps.jsonl", HEADER)
    writer.close()
    assert threading.active_count() == before


def test_a_server_killed_in_the_middle_of_a_line_leaves_a_log_to_read(tmp_path):
    path = tmp_path / "steps.jsonl"
    writer = TraceWriter(path, HEADER)
    for step in range(3):
        writer.append(record(step))
    writer.close()
    text = path.read_text()
    path.write_text(text[:-5])
    assert [b.step for b in read_step_log(path).batches] == [0, 1]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "line 1"),
        ("{}\n", "not a step log"),
        ('{"ppbalance_trace": 1}\n', "lacks pp_size"),
        (json.dumps({"ppbalance_trace": 1, "columns": [], **HEADER}) + "\n", "columns"),
        (json.dumps({"ppbalance_trace": 1, "columns": COLUMNS, **HEADER}) + "\n[1]\n", "line 2"),
        (json.dumps({"ppbalance_trace": 1, "columns": COLUMNS, **HEADER}) + "\n", "no micro-batch"),
    ],
)
def test_a_file_that_is_no_step_log_is_refused_in_one_line(tmp_path, capsys, text, words):
    path = tmp_path / "steps.jsonl"
    path.write_text(text)
    with pytest.raises(SystemExit) as ended:
        main(["explain", str(path)])
    assert ended.value.code == 2
    message = capsys.readouterr().err
    assert words in message
    assert message.count("\n") == 1


def test_the_drawn_stages_are_the_simulated_ones(tmp_path):
    log, ran = logged_run(tmp_path, batch_of(12, prompt=300, max_tokens=40), pp_size=4, **ASYNC)
    origin_s = log.batches[0].submitted_s
    for drawn, true in zip(timeline_of(log, "x").stages, ran.intervals, strict=True):
        assert [busy.step for busy in drawn] == [b.step for b in log.batches]
        assert [busy.end_s + origin_s for busy in drawn] == pytest.approx(
            [interval.end_s for interval in true], abs=1e-3
        )


def test_trace_writes_events_for_perfetto_and_a_picture(tmp_path, capsys):
    log, _ = logged_run(tmp_path, batch_of(6, prompt=100, max_tokens=10), pp_size=2, **SYNC)
    out, figure = tmp_path / "trace.json", tmp_path / "rows.png"
    path = str(tmp_path / "steps.jsonl")
    assert main(["trace", path, "--out", str(out), "--figure", str(figure)]) == 0
    events = json.loads(out.read_text())["traceEvents"]
    work = [event for event in events if event["ph"] == "X"]
    assert len(work) == 2 * len(log.batches)
    assert {event["tid"] for event in work} == {0, 1}
    assert {event["name"] for event in events if event["ph"] == "C"} == {"requests"}
    assert figure.read_bytes().startswith(b"\x89PNG")
    assert "ui.perfetto.dev" in capsys.readouterr().out


def spaced(count, gap_s, prompt, max_tokens, prefix="r"):
    return [RequestSpec(f"{prefix}{i}", gap_s * i, prompt(i), max_tokens(i)) for i in range(count)]


def slo(config, **targets):
    config["ppbalance"] |= targets
    return config


# What is wrong, the run that shows it, and a word of the finding and of the advice.
HELD_BACK = {
    "large chunks beside decodes": (
        settings("fixed", "off"),
        spaced(60, 0.05, lambda i: 1500, lambda i: 120),
        "run beside ones that only decode",
        "chunk.strategy to spread",
    ),
    "all decodes in one micro-batch": (
        settings("fixed", "off"),
        batch_of(100, prompt=4, max_tokens=200),
        "while the others had 100 decodes each",
        "rebalance.strategy to even_share",
    ),
    "one micro-batch with more decodes": (
        settings("fixed", "off"),
        batch_of(100, prompt=4, max_tokens=200)
        + spaced(30, 0.013, lambda i: 4, lambda i: 200, prefix="s"),
        "decodes are unequal",
        "rebalance.strategy to even_share",
    ),
    "hardly any load": (
        settings("greedy", "even_share"),
        spaced(20, 0.2, lambda i: 20, lambda i: 10),
        "fewer than 4 micro-batches",
        "room for more requests",
    ),
    "chunks too small for the prompts": (
        slo(settings("fixed", "even_share", fixed_tokens=64), slo_ttft=0.2),
        spaced(80, 0.02, lambda i: 300, lambda i: 3),
        "misses slo_ttft",
        "raise chunk.fixed_tokens",
    ),
    "chunks too large for the gaps": (
        slo(settings("fixed", "even_share"), slo_tpot=0.035),
        spaced(80, 0.03, lambda i: 1500, lambda i: 60),
        "misses slo_tpot",
        "lower chunk.fixed_tokens",
    ),
}


@pytest.mark.parametrize(
    ("config", "requests", "words", "advice"), HELD_BACK.values(), ids=HELD_BACK
)
def test_explain_names_what_held_the_pipeline_back(
    tmp_path, capsys, config, requests, words, advice
):
    log, _ = logged_run(tmp_path, requests, config, num_gpu_blocks=1 << 14, pp_size=4, **ASYNC)
    first = findings(log, summarise(log))[0]
    print(first)
    assert words in first.words
    assert advice in first.advice
    assert main(["explain", str(tmp_path / "steps.jsonl")]) == 0
    assert f"1. {first.words[0].upper()}{first.words[1:]}" in capsys.readouterr().out


def test_explain_has_nothing_to_say_of_an_even_pipeline(tmp_path, capsys):
    config = settings("fixed", "even_share")
    log, _ = logged_run(
        tmp_path, batch_of(64, prompt=4, max_tokens=400), config, pp_size=4, **ASYNC
    )
    assert findings(log, summarise(log)) == []
    assert main(["explain", str(Path(tmp_path) / "steps.jsonl")]) == 0
    assert "Nothing held the pipeline back." in capsys.readouterr().out
