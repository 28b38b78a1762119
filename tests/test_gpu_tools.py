"""The vLLM-free parts of bench/gpu: what is compared and how errors are told apart."""

import gzip
import json

import pytest

from bench.batch import BatchShape
from bench.fit_rows import MeasuredShape
from bench.gpu import predictor_check, same_tokens
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
