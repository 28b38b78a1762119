"""One run: what it measures, what it refuses, and that it repeats to the byte."""

import json
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from bench.__main__ import main
from bench.batch import BatchShape
from bench.latency import load_profile
from bench.pipeline import LINKS, Activations
from bench.policies import parse_policy
from bench.sim_spec import SimSpec, split_layers
from bench.simulate import PolicyFailedError, simulate
from bench.workloads import BenchRequest
from tests.runs import FREE_HOST, small_spec

pytestmark = pytest.mark.scheduler

ONE = BenchRequest("only", 1.0, 100, 2)


def scheduled_prefill(outcome):
    return sum(step.shape.prefill_tokens for step in outcome.run.steps)


def test_a_lone_request_takes_the_stages_and_the_link_and_nothing_else():
    spec = small_spec(host=FREE_HOST, pipeline_overhead=False)
    outcome = simulate(spec, requests=[ONE])
    profile, link = load_profile(spec.profile), LINKS["nvlink"]

    def trip(shape):
        num_bytes = Activations(profile.hidden_size).num_bytes(shape.num_tokens)
        hop = num_bytes / link.bandwidth_bytes_s + link.latency_s
        first = profile.stage_seconds(shape, 32, embedding=True)
        return first + hop + profile.stage_seconds(shape, 32, lm_head=True)

    (record,) = outcome.records
    assert record.ttft_s == pytest.approx(trip(BatchShape(((100, 0),))))
    # The second token's step cannot start before the first has left the last stage.
    assert record.tpot_s == pytest.approx(trip(BatchShape((), 1, 1, 101)), rel=0.01)


def test_host_time_and_overhead_slow_a_run_down():
    free = simulate(small_spec(host=FREE_HOST, pipeline_overhead=False))
    host = simulate(small_spec(pipeline_overhead=False))
    both = simulate(small_spec())
    ends = [run.result["pipeline"]["end_s"] for run in (free, host, both)]
    assert ends == sorted(set(ends))
    assert free.result["pipeline_overhead"] is None
    assert both.result["pipeline_overhead"]["sustained"] > 1.0


def test_a_stage_of_more_layers_is_busier():
    even = simulate(small_spec()).result["pipeline"]["busy_share"]
    uneven = simulate(small_spec(stage_layers=[40, 24])).result["pipeline"]["busy_share"]
    assert uneven[0] > even[0]
    assert uneven[0] > uneven[1]


def test_layers_that_do_not_divide_go_before_the_last_stage():
    assert split_layers(64, 4) == (16, 16, 16, 16)
    assert split_layers(66, 4) == (16, 17, 17, 16)


def test_a_cut_run_counts_what_is_left_as_missed():
    whole = simulate(small_spec()).result["measures"]
    cut = simulate(small_spec(time_limit_s=0.6)).result["measures"]
    assert whole["num_unfinished"] == 0
    assert whole["slo_attainment"] == 1.0
    assert 0 < cut["num_requests"] < 8
    assert cut["num_unfinished"] == 8 - cut["num_requests"]
    assert cut["slo_attainment"] == pytest.approx(cut["num_requests"] / 8)
    assert not cut["meets_p90_rule"]


def test_mooncake_prefixes_are_computed_once(tmp_path):
    row = {"timestamp": 0, "input_length": 1024, "output_length": 4, "hash_ids": [1, 2]}
    rows = [{**row, "timestamp": 1000 * i} for i in range(3)]
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    sent = {
        "name": "mooncake",
        "path": "trace.jsonl",
        "rate": None,
        "num_prompts": None,
        "prompt_range": None,
        "output_range": None,
    }
    without = simulate(small_spec(workload=sent), tmp_path)
    cached = simulate(small_spec(workload=sent, prefix_caching=True), tmp_path)
    assert scheduled_prefill(without) == 3 * 1024
    # vLLM recomputes the last block, to have a token to sample from.
    assert scheduled_prefill(cached) == 1024 + 2 * 16


BUSY = {"rate": 90.0, "num_prompts": 400, "prompt_range": [20, 400], "output_range": [5, 300]}


@pytest.mark.parametrize(
    ("policy", "fields"),
    [
        ("ours:greedy/even_share", {"noise": 0.1, "seed": 3}),
        ("ours:balanced/auto", {"workload": BUSY}),
    ],
)
def test_the_same_spec_gives_the_same_bytes_in_another_process(policy, fields, tmp_path):
    spec = small_spec(policy, **fields)
    here = simulate(spec).to_json()
    out = tmp_path / "run.json"
    file = tmp_path / "spec.yaml"
    file.write_text(json.dumps(spec.as_json()))
    subprocess.run(
        [sys.executable, "-m", "bench", "simulate", "--spec", str(file), "--out", str(out)],
        check=True,
        capture_output=True,
        cwd=Path(__file__).parents[1],
        env={**os.environ, "PYTHONHASHSEED": "7", "PPBALANCE_SLO_TPOT": "9"},
        timeout=300,
    )
    there, commit = out.read_text(), json.loads(here)["versions"]["commit"]
    # Somebody may commit to this checkout between the two runs.
    assert there.replace(str(json.loads(there)["versions"]["commit"]), str(commit)) == here
    assert "wall_s" not in here
    assert json.loads(out.with_suffix(".real.json").read_text())["wall_s"] > 0.0


def test_a_run_starts_from_an_idle_start_of_its_own_and_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    spec = small_spec("ours:balanced/even_share")
    other = small_spec("ours:alp/even_share", profile="h200_qwen2.5-14b")
    first = simulate(spec).to_json()
    simulate(other)
    assert simulate(spec).to_json() == first
    cold = simulate(spec.model_copy(update={"cold_start": True})).result
    reasons = cold["effective_settings"], json.loads(first)["effective_settings"]
    assert reasons[0] == reasons[1]
    assert cold["measures"] != json.loads(first)["measures"]
    assert not list(tmp_path.rglob("*.json"))


def test_a_predictor_that_is_wrong_stays_wrong():
    burst = {"num_prompts": 40, "rate": 400.0, "prompt_range": [1500, 2000]}
    right = small_spec("ours:balanced/even_share", burst)
    wrong = simulate(right.model_copy(update={"predictor_scale": 4.0}))
    assert wrong.result["measures"] != simulate(right).result["measures"]


def test_another_seed_gives_other_noise():
    first, second = (simulate(small_spec(noise=0.1, seed=seed)) for seed in (0, 1))
    assert first.result["measures"]["e2el_s"] != second.result["measures"]["e2el_s"]


def test_sync_scheduling_runs_too():
    outcome = simulate(small_spec(mode="sync"))
    assert outcome.result["measures"]["num_requests"] == 8


def test_a_policy_that_gives_up_is_no_result(monkeypatch):
    def broken(*_args):
        raise ZeroDivisionError

    monkeypatch.setattr("vllm_ppbalance.controller.Controller.decide", broken)
    with pytest.raises(PolicyFailedError, match="ours:greedy/off"):
        simulate(small_spec("ours:greedy/off"))


def test_settings_of_ours_are_in_the_record():
    outcome = simulate(small_spec("ours:fixed/threshold,chunk.fixed_tokens=300"))
    effective = outcome.result["effective_settings"]
    assert effective["chunk"]["fixed_tokens"] == 300
    assert effective["rebalance"]["strategy"] == "threshold"
    assert max(step.shape.num_tokens for step in outcome.run.steps) <= 300


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"workload": {"name": "azur"}}, "azur.*azure_conv"),
        ({"workload": {"name": "random", "rat": 3}}, "rat: unknown.*rate"),
        ({"link": "isdn"}, "isdn.*pcie4"),
        ({"profile": "h300"}, "h300.*h200_qwen2.5-32b"),
        ({"stage_layers": [30, 30]}, r"\[30, 30\].*sum to 64"),
        ({"pp_size": 0}, "pp_size = 0.*greater than or equal to 1"),
        ({"max_seqs": 3}, "max_seqs = 3: no such field"),
    ],
)
def test_a_wrong_spec_is_told_what_would_be_right(fields, words):
    with pytest.raises(ValueError, match=words):
        SimSpec.parse({**small_spec().as_json(), **fields})


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("stok:512", "stok.*static_cap"),
        ("stock:many", "many.*budget"),
        ("ours:nice/even_share", "nice.*greedy"),
        ("ours:greedy", "CHUNK/REBALANCE"),
        ("ours:nowhere.yaml", "nowhere.yaml"),
    ],
)
def test_a_wrong_policy_is_told_what_would_be_right(text, words):
    with pytest.raises(ValueError, match=words):
        parse_policy(text)


def test_a_spec_survives_json_and_its_key_knows_every_field():
    spec = small_spec()
    again = SimSpec.parse(json.loads(json.dumps(spec.as_json())))
    assert again == spec
    assert again.key == spec.key
    assert small_spec(seed=1).key != spec.key


def test_the_command_writes_a_record_and_names_what_is_wrong(tmp_path, capsys):
    words = ["simulate", "--workload", "random", "--rate", "20", "--num-prompts", "4"]
    words += ["--pp-size", "2", "--kv-cache-gib", "8", "--policy", "stock:256"]
    out, trace, figure = (tmp_path / name for name in ("run.json", "trace.json", "rows.png"))
    files = ["--out", str(out), "--trace", str(trace), "--figure", str(figure)]
    assert main([*words, *files]) == 0
    assert "4 requests done, 0 not" in capsys.readouterr().out
    assert json.loads(out.read_text())["spec"]["policy"]["budget"] == 256
    assert figure.read_bytes().startswith(b"\x89PNG")
    check_trace(json.loads(trace.read_text())["traceEvents"], num_stages=2, num_requests=4)
    with pytest.raises(SystemExit) as stopped:
        main([*words, "--link", "isdn"])
    assert stopped.value.code == 2
    assert "there are: nvlink" in capsys.readouterr().err


def check_trace(events, num_stages, num_requests):
    rows = {event["tid"] for event in events if event["ph"] == "X"}
    assert rows == set(range(num_stages))
    starts = {event["id"]: event for event in events if event["ph"] == "s"}
    ends = {event["id"]: event for event in events if event["ph"] == "f"}
    assert len(starts) == len(ends) == num_requests
    assert all(starts[name]["tid"] == 0 for name in starts)
    assert all(ends[name]["tid"] == num_stages - 1 for name in ends)
    assert all(starts[name]["ts"] < ends[name]["ts"] for name in starts)
    per_stage = [[e for e in events if e["ph"] == "X" and e["tid"] == n] for n in rows]
    for stage in per_stage:
        assert all(a["ts"] + a["dur"] <= b["ts"] + 1e-3 for a, b in pairwise(stage))
