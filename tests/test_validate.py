"""Real runs beside simulated ones: the arithmetic, the logs, and two real runs met."""

import gzip
import json

import pytest

from bench.batch import BatchShape
from bench.pipeline_overhead import PipelineOverhead
from bench.simulate import simulate
from bench.step_excess import LoggedStep, alone, back_to_back, excess_table, read_log
from bench.validate import (
    AZURE_CONV,
    Numbers,
    Pair,
    load_runs,
    pair_up,
    spec_of,
    wrong_orders,
)
from bench.workloads import build, h200x2_pp2
from tests.shared_data import data_file

RUN = {
    "name": "a",
    "request_rate": 9,
    "num_prompts": 20,
    "max_num_scheduled_tokens": 512,
    "decode_even_share": False,
    "lengths": "azure_conv",
}


def numbers(tok=100.0, ttft=0.2, tpot=0.05, tpot_p90=0.06, attained=1.0):
    return Numbers(tok, ttft, ttft, tpot, tpot_p90, attained)


def pair(name, real, simulated, **fields):
    return Pair({**RUN, "name": name, **fields}, real, simulated)


def test_a_miss_is_named_with_its_error_and_bound():
    assert pair("a", numbers(), numbers(tok=104.9, ttft=0.24)).misses() == []
    misses = pair("a", numbers(), numbers(tok=94.0, ttft=0.26, tpot=0.057)).misses()
    assert misses == [
        "output_tok_per_s -6.0%, target 5%",
        "tpot_mean_s +14.0%, target 12%",
        "ttft_mean_s +30.0%, target 25%",
    ]
    assert pair("a", numbers(), numbers(tok=94.0), lengths="azure_conv_swapped").misses() == []


def test_orders_are_compared_within_one_rate_and_a_tie_is_wrong():
    a = pair("a", numbers(ttft=0.2, attained=0.9), numbers(ttft=0.3, attained=1.0))
    b = pair("b", numbers(ttft=0.4, attained=1.0), numbers(ttft=0.5, attained=1.0))
    (wrong,) = wrong_orders([a, b])
    assert wrong.startswith("slo_attainment at 9 req/s: a and b are 0.9000 and 1.0000")
    swapped = pair("b", numbers(ttft=0.4), numbers(ttft=0.25))
    assert [w.split()[0] for w in wrong_orders([a, swapped])] == ["ttft_mean_s", "slo_attainment"]
    assert wrong_orders([a, pair("b", b.real, numbers(ttft=0.1), request_rate=4)]) == []


def test_the_spec_sends_the_very_requests_of_the_real_runs():
    path = data_file(*AZURE_CONV.split("/"))
    for swapped, lengths in ((False, "azure_conv"), (True, "azure_conv_swapped")):
        spec = spec_of({**RUN, "lengths": lengths}, path)
        assert build(spec.workload) == h200x2_pp2(path, 9, 20 / 9 + 1e-6, swapped)
    assert spec_of({**RUN, "decode_even_share": True}, path).policy.scheduler == "ours"


def test_runs_without_a_field_are_refused(tmp_path):
    (tmp_path / "runs.json").write_text(json.dumps([RUN, {"name": "b"}]))
    with pytest.raises(ValueError, match="entry 1 has no 'request_rate'"):
        load_runs(tmp_path)


def test_a_log_gives_back_the_prompt_chunks(tmp_path):
    rows = [
        {"t": 1.0, "step": 1, "tok": 100, "dec": 0},
        {"t": 1.1, "step": 2, "tok": 0, "dec": 0},
        {"t": 1.2, "step": 3, "tok": 151, "dec": 1},
        {"done": 2.0, "tok": 100},
        {"done": 2.1, "tok": 0},
        {"done": 3.0, "tok": 151},
    ]
    path = tmp_path / "steps.jsonl.gz"
    with gzip.open(path, "wt") as file:
        file.write("".join(json.dumps(row) + "\n" for row in rows))
    first, second = read_log(path, [(130, 10), (300, 10)])
    assert first == LoggedStep(BatchShape(((100, 0),)), 1.0, 2.0)
    assert second.shape.prefills == ((30, 100), (120, 0))
    assert second.shape.decode_context == 220  # (130 + 5 + 300 + 5) / 2
    assert (second.schedule_s, second.done_s) == (1.2, 3.0)


def test_excess_is_what_a_step_took_beyond_the_profile():
    small, large = BatchShape((), 4, 4, 400), BatchShape(((1000, 0),))

    def stage_s(shape):
        return 0.010 if shape == small else 0.100

    # Two small steps, a large one that takes 5 ms more a stage, then large ones with 7 ms more.
    steps = [LoggedStep(small, 0.0, 0.020), LoggedStep(small, 0.010, 0.030)]
    steps.append(LoggedStep(large, 0.030, 0.030 + 0.210))
    steps += [LoggedStep(large, 0.040, 0.240 + 0.107 * i) for i in range(1, 7)]
    (single,) = alone(steps, stage_s, stage_s)
    assert single == (1000, 0.2, pytest.approx(0.010))
    (row,) = excess_table(list(back_to_back(steps, stage_s)))
    assert (row.steps, row.profile_s) == (5, 0.1)
    assert row.excess_s == pytest.approx(0.007)


def test_the_overhead_is_on_prompts_of_some_sizes_and_on_large_ones_in_a_row():
    overhead = PipelineOverhead(((100, 0.0), (200, 1e-4), (300, 0.0)), 400, 1.5)
    stage = overhead.wrap(lambda _shape: 1.0, num_layers=10)
    decodes, large = BatchShape((), 150, 150, 1), BatchShape(((500, 0),))
    assert [stage(BatchShape(((n, 0),))) for n in (50, 150, 200, 350)] == pytest.approx(
        [1.0, 1.0005, 1.001, 1.0]
    )
    assert [stage(s) for s in (decodes, large, large, large, decodes, large)] == [
        1.0,
        1.0,
        1.5,
        1.5,
        1.0,
        1.0,
    ]


@pytest.mark.scheduler
def test_a_real_run_is_met_within_the_targets():
    lengths = data_file(*AZURE_CONV.split("/"))
    runs = [run for run in load_runs(data_file("h200x2_pp2")) if run["request_rate"] == 4]
    pairs = list(pair_up(runs, lambda run: simulate(spec_of(run, lengths)).result["measures"]))
    assert [p.misses() for p in pairs] == [[], []]
    assert wrong_orders(pairs) == []
