"""Sweeps, goodput and comparisons: many runs, each once."""

from types import SimpleNamespace

import pytest

from bench import parallel
from bench.compare import load_results, rows
from bench.figures import attainment_bars, latency_against_rate
from bench.goodput_search import RULES, Bounds, search, shown
from bench.measures import RequestRecord
from bench.parallel import result_path, run_all
from bench.sweep import load_sweep, make_sweep, markdown_table, report
from tests.runs import small_spec

SWEEP = {
    "base": {"pp_size": 2},
    "policies": ["stock:256", "stock:512"],
    "workloads": [{"workload": {"name": "random", "num_prompts": 4}, "slo": {"ttft_s": 1.0}}],
    "rates": [5, 10],
}


def record(attainment, rate=10.0, policy="stock:256"):
    quartet = {"mean": 0.1, "p50": 0.1, "p90": 0.2, "p99": 0.3}
    causes = {"decode_decode": 0.03, "prefill_decode": 0.02, "prefill_prefill": 0.01}
    return {
        "spec": {"policy": {"name": policy}, "workload": {"name": "w"}, "slo": SLO},
        "versions": {"vllm": "0.32.0"},
        "workload": {"num_requests": 40, "span_s": 40 / rate, "sha256": f"{rate}"},
        "measures": {
            "num_requests": 40,
            "num_unfinished": 0,
            "slo_attainment": attainment,
            **dict.fromkeys(("ttft_s", "tpot_s", "itl_s", "e2el_s"), quartet),
            "output_tok_per_s": 10.0,
            "total_tok_per_s": 100.0,
        },
        "pipeline": {
            "bubble_ratio": 0.1,
            "bubble_ratio_by_cause": {**causes, "starved": 0.04},
            "busy_share": [0.9, 0.8],
            "decode_spread": {"max_minus_min": 1.0},
        },
        "num_moves": 0,
        "preemptions": 0,
    }


SLO = {"ttft_s": 2.0, "tpot_s": 0.2}


def test_a_sweep_is_every_policy_on_every_workload_at_every_rate():
    sweep = make_sweep(SWEEP)
    seen = [(c.spec.workload.rate, c.spec.policy.budget) for c in sweep.cases]
    assert seen == [(5.0, 256), (5.0, 512), (10.0, 256), (10.0, 512)]
    assert {case.spec.slo.ttft_s for case in sweep.cases} == {1.0}
    assert len({case.spec.key for case in sweep.cases}) == 4


def test_the_preset_needs_no_trace_files_when_told_so():
    sweep = load_sweep("fixed_budgets", files=False)
    assert len(sweep.cases) == 8 * 7
    assert {case.spec.workload.path for case in sweep.cases} == {None}
    with pytest.raises(ValueError, match=r"fixed_budget' is unknown; there are: .*fixed_budgets"):
        load_sweep("fixed_budget")


def test_the_table_puts_each_cause_in_its_column_and_the_best_in_bold():
    sweep = make_sweep({**SWEEP, "rates": None})
    results = [record(0.5), record(0.75)]
    table = markdown_table(sweep.cases, results).splitlines()
    assert table[0].split("|")[8:12] == [" P-P ", " P-D ", " D-D ", " starved "]
    assert table[2].split("|")[8:12] == [" 0.010 ", " 0.020 ", " 0.030 ", " 0.040 "]
    assert "**0.750**" in table[3]
    assert "**" not in table[2]
    page = report(sweep, results, "python -m bench sweep x", source="rows")
    assert "python -m bench sweep x" in page
    assert "h200_qwen2.5-32b" in page


@pytest.mark.scheduler
def test_a_sweep_keeps_what_it_has_and_names_what_failed(tmp_path, monkeypatch):
    good = small_spec()
    bad = small_spec(workload={"name": "azure_conv", "path": "not-there.csv"})
    with pytest.raises(RuntimeError, match=r"1 of 2 runs failed:\n.*not-there.csv"):
        run_all([good, bad], tmp_path, data=tmp_path, workers=1)

    def no_pool(*_args, **_fields):
        raise AssertionError("started again")

    monkeypatch.setattr(parallel, "ProcessPoolExecutor", no_pool)
    (again,) = run_all([good], tmp_path, workers=1)
    assert again["key"] == good.key
    result_path(tmp_path, good).write_text('{"half": ')
    with pytest.raises(AssertionError, match="started again"):
        run_all([good], tmp_path, workers=1)


@pytest.mark.scheduler
@pytest.mark.slow
def test_ray_gives_the_same_record(tmp_path):
    pytest.importorskip("ray", reason="the package ray is not installed")
    spec = small_spec()
    (there,) = run_all([spec], tmp_path / "ray", ray_address="local")
    (here,) = run_all([spec], tmp_path / "here", workers=1)
    assert there == here


def test_goodput_finds_the_rate_and_shares_the_runs(monkeypatch):
    sent = []

    def fake(spec, _data):
        rate = spec.workload.rate
        sent.append((rate, spec.workload.num_prompts))
        # Up to 10 req/s all is well, up to 12 for nine of ten.
        late = 0 if rate <= 10 else 10 if rate <= 12 else 50
        records = [
            RequestRecord(f"{i}", 0.0, 9.0 if i < late else 1.0, 10.0, 5, 100) for i in range(100)
        ]
        return SimpleNamespace(records=records, result={"measures": {"num_unfinished": 0}})

    monkeypatch.setattr("bench.simulate.simulate", fake)
    fields = {"workload": {"name": "random"}, "pp_size": 2}
    found = search("stock:512", fields, Bounds(1.0, 33.0, 0.5, 10.0), None)
    assert found.rates[RULES[2]] == pytest.approx(10.0, abs=0.5)
    assert found.rates[RULES[1]] == pytest.approx(12.0, abs=0.5)
    assert len(sent) == len(set(sent)) == found.runs
    assert all(count == round(rate * 10) for rate, count in sent)


def test_a_rate_at_the_end_of_the_range_is_shown_as_a_bound():
    bounds = Bounds(1.0, 8.0, 0.5, 10.0)
    assert [shown(rate, bounds) for rate in (0.0, 3.25, 8.0)] == ["< 1", "3.25", ">= 8"]


def test_records_side_by_side(tmp_path):
    table = dict(rows([record(0.5), record(0.75)]))
    assert table["slo_attainment"] == ["0.5000", "0.7500"]
    assert table["TTFT p90, ms"] == ["200.0", "200.0"]
    assert table["  prefill-prefill"] == ["0.010", "0.010"]
    (tmp_path / "x.json").write_text("{}")
    with pytest.raises(ValueError, match=r"x.json: not the record of a run"):
        load_results([tmp_path])


def test_figures_are_drawn(tmp_path):
    results = [record(0.5, 5.0), record(0.4, 10.0), record(0.9, 5.0, "ours")]
    lines, bars = tmp_path / "lines.png", tmp_path / "bars.png"
    latency_against_rate(lines, results, lambda r: r["spec"]["policy"]["name"])
    attainment_bars(bars, results, lambda r: r["spec"]["policy"]["name"])
    assert lines.read_bytes().startswith(b"\x89PNG")
    assert bars.read_bytes().startswith(b"\x89PNG")
    assert lines.stat().st_size > 10_000
