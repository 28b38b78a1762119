"""The vLLM-free parts of bench/gpu: what is compared and how errors are told apart."""

import gzip
import json

import pytest

from bench.batch import BatchShape
from bench.fit_rows import MeasuredShape
from bench.gpu import clock_fit, predictor_check, rows_report, same_tokens
from bench.gpu.clock_fit import Clock, Row
from bench.gpu.models import SHAPES, write_model
from bench.predictor import HOST_S
from vllm_ppbalance.trace import COLUMNS, VERSION


class Model:
    """A tenth of a millisecond a token."""

    def predict(self, tokens, prefills, decodes, context):
        return tokens * 1e-4


def shape(prefills, decodes):
    return BatchShape(prefills, decodes, decodes, 100 * decodes)


def test_rows_are_told_apart_and_lose_the_hosts_part():
    shapes = [
        MeasuredShape(shape(((600, 0),), 0), (0.06 + HOST_S, 0.05 + HOST_S, 0.07 + HOST_S)),
        MeasuredShape(shape(((100, 0),), 0), (0.02 + HOST_S,)),
        MeasuredShape(shape(((100, 0),), 10), (0.022 + HOST_S,)),
        MeasuredShape(shape((), 10), (0.001 + HOST_S,)),
    ]
    found = list(predictor_check.on_rows(Model(), shapes))
    assert [kind for kind, _ in found] == [
        "prompts",
        predictor_check.FEW,
        "prompts and decodes",
        "decodes",
    ]
    assert [error for _, error in found] == pytest.approx([0.0, 50.0, 50.0, 0.0])


def test_only_measured_steps_after_the_first_seconds_count(tmp_path):
    def line(at_s, clear, predicted_s, decodes):
        values = dict.fromkeys(COLUMNS, 0) | {
            "done_s": at_s,
            "stage_s": 0.1,
            "clear": clear,
            "predicted_s": predicted_s,
            "decodes": decodes,
            "prefills": [] if decodes else [[10, 0]],
            "reason": "",
        }
        return json.dumps([values[name] for name in COLUMNS])

    header = {"ppbalance_trace": VERSION, "columns": COLUMNS, "pp_size": 1, "settings": {}}
    lines = [
        json.dumps(header),
        line(0.0, 1, 0.9, 1),  # the first seconds
        line(6.0, 0, 0.9, 1),  # no clear time
        line(7.0, 1, None, 1),  # nothing predicted
        line(8.0, 1, 0.11, 1),
        line(9.0, 1, 0.13, 0),
    ]
    path = tmp_path / "online.jsonl.gz"
    path.write_bytes(gzip.compress("\n".join([*lines, ""]).encode()))
    text = "\n".join(predictor_check.online_lines(path))
    assert "| all | 2 | 20.0 | 20.0 | 28.0 |" in text
    assert "| with prompts | 1 | 30.0" in text
    assert "| decodes only | 1 | 10.0" in text


def test_an_engine_that_gave_no_tokens_is_not_one_that_agrees(tmp_path):
    def left(name, tokens):
        path = same_tokens.result_file(tmp_path, name, 2, "async")
        path.write_text(json.dumps({"tokens": tokens, "failed": False, "scheduler": []}))

    left("stock", [[1, 2], [3]])
    left("default", [[1, 2], [4]])
    names = ["stock", "default", "stock again"]
    rows = same_tokens.compare(tmp_path, names, 2, "async")
    assert [row["other"] for row in rows] == [0, 1, None]


def test_a_stage_is_a_quarter_of_its_model(tmp_path):
    write_model(tmp_path, "qwen2.5-32b-stage")
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["num_hidden_layers"] * 4 == SHAPES["qwen2.5-32b"]["num_hidden_layers"]
    assert config["hidden_size"] == SHAPES["qwen2.5-32b"]["hidden_size"]


def micro_batches(clock, pauses_s):
    """512 tokens after each pause, as long as `clock` says; cold they take 30 ms."""
    rows, now_s = [], 0.0
    for pause_s in pauses_s:
        now_s += pause_s
        row = Row(shape(((512, 0),), 0), now_s, 0.03, 0.03)
        seconds = clock.times([*rows, row], [0.03] * (len(rows) + 1))[-1]
        rows.append(row._replace(forward_s=seconds))
        now_s += seconds
    return rows


def test_a_gpu_at_its_limit_takes_longer_and_recovers_in_a_pause():
    times = [row.forward_s for row in micro_batches(Clock(0.06, 0.2, 0.0), [0.0] * 12 + [1.0])]
    assert [times[0], times[12]] == pytest.approx([0.03, 0.03])
    assert times[:12] == sorted(times[:12])
    # Cold ones heat up as well: at the limit it is less than a fifth over them.
    assert 0.03 * 1.14 < times[11] < 0.03 * 1.2


def test_the_clock_that_made_the_times_is_found():
    made = Clock(0.08, 0.23, 0.05)
    gaps = [[0.0] * 8 + [0.05] * 4 + [0.2] * 3, [0.01] * 12]
    loads = [micro_batches(made, each) for each in gaps]
    found = clock_fit.best_clock(loads, [[0.03] * len(rows) for rows in loads])
    assert (found.tau_s, found.heavy) == (made.tau_s, made.heavy)


def test_stage_rows_are_read_without_their_first_ones_and_one_time_work(tmp_path):
    path = tmp_path / "stages.json"
    rows = [[64, 64, 0.1 * i, 0.01, 0.0] for i in range(clock_fit.STARTING)]
    rows += [[64, 64, 1.0, 0.01, 0.0], [164, 11, 1.1, 0.02, 0.0], [64, 64, 1.2, 0.9, 0.0]]
    path.write_text(json.dumps({"fields": [], "stages": [rows]}))
    found = clock_fit.read_rows(path, lambda batch: 1e-4 * batch.num_tokens)
    assert [(r.shape.prefills, r.shape.decodes) for r in found] == [((), 64), (((154, 0),), 10)]
    assert clock_fit.cold_factors(path, lambda batch: 0.01)[0] == [64.0, 164.0]


def test_rows_alone_and_in_a_row_are_told_apart(tmp_path):
    runs = [
        {"stock": 8192, "prompts": [256, 512], "events": True},
        {"stock": 512, "prompts": [512], "queued": True, "events": True},
        {"stock": 256, "prompts": [256], "queued": True},
    ]
    alone = [[256, 1, 0.0, 0.008, 0.0], [512, 1, 0.3, 0.014, 0.0]]
    # The first is not warm yet; the last micro-batch of a run may be a smaller one.
    many = [[512, 1, 0.1, 0.9, 0.0], [512, 1, 0.5, 0.016, 0.0], [100, 1, 0.6, 0.004, 0.0]]
    (tmp_path / "results.json").write_text(json.dumps({"runs": runs}))
    (tmp_path / "stages-0.json").write_text(json.dumps({"fields": [], "stages": [alone]}))
    packed = gzip.compress(json.dumps({"fields": [], "stages": [many]}).encode())
    (tmp_path / "stages-1.json.gz").write_bytes(packed)
    cold, hot = rows_report.rows_of(tmp_path)
    assert (cold, hot) == ({256: [0.008], 512: [0.014]}, {512: [0.016]})
    lines = list(rows_report.table(cold, hot))
    assert lines[2].startswith("| 512 | 14.00 | 14.00 to 14.00 | 16.00 | 1.14 |")
    assert len(lines) == 3
