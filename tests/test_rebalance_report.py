"""The rebalancing report's own arithmetic, on made-up runs."""

import pytest

pytest.importorskip("vllm")

from dataclasses import replace

from bench import rebalance_runs
from bench.rebalance_cases import CASES
from bench.rebalance_report import rows_of
from bench.rebalance_runs import goodput


def run(**fields):
    tpot = {"p50": 0.02, "p90": 0.04, "p99": 0.05}
    plain = {"rate": 10.0, "dd": 0.02, "removable": 0.01, "bubbles": 0.1, "tok_per_s": 1000.0}
    rest = {"steady_tok_per_s": 1100.0, "ttft_p90_s": 0.3, "moves": 0, "own_share": 0.02}
    return {**plain, **rest, "tpot_s": tpot, **fields}


def test_rows_compare_each_seed_with_off_and_say_how_sure_that_is():
    off = [run(), run(tok_per_s=2000.0)]
    auto = [run(tok_per_s=1010.0, removable=0.002), run(tok_per_s=2060.0, removable=0.002)]
    rows = rows_of(CASES[0], {"off": off, "auto": auto})
    assert "| 2.00 | 1.00 | 10.0 | 1500 | 1100 |" in rows[0]
    assert "| 2.00 | 0.20 (-80%) | 10.0 | 1535 (+2.0±1.0 %) | 1100 |" in rows[1]


def test_rows_name_no_cut_where_there_is_nothing_to_remove():
    little = run(removable=0.004)
    row = rows_of(CASES[0], {"off": [little], "auto": [run(removable=0.001)]})[1]
    assert "| 2.00 | 0.10 | 10.0 |" in row


def test_goodput_lies_where_p90_tpot_crosses_its_target(monkeypatch, tmp_path):
    def made_up(case, strategy, cache, seed):
        tpot = {"p90": 0.1 * case.load}
        return run(rate=50.0 * case.load, tpot_s=tpot, ttft_p90_s=0.1 if case.load < 0.9 else 9.0)

    monkeypatch.setattr(rebalance_runs, "cached_run", made_up)
    case = replace(CASES[0], load=0.1)
    assert goodput(case, "off", 0.0777, tmp_path, 0) == pytest.approx(0.777 * 50.0)
    assert 0.85 * 50.0 < goodput(case, "off", 0.098, tmp_path, 0) < 0.9 * 50.0  # by TTFT
    with pytest.raises(ValueError, match="not at loads"):
        goodput(case, "off", 0.03, tmp_path, 0)
