"""This machine's host time: found with requests alone, told, and put into the simulated run."""

import json

import pytest

from bench.cli_options import make_spec
from bench.measures import RequestRecord, measure
from bench.sim_spec import HostModel
from bench.wall_clock import check
from bench.wall_clock.host_time import TokenGaps, alone, extra_time, full, slower
from bench.wall_clock.runs import Served, with_host

GPU_SERVER = HostModel()
NAME = "mean TPOT (ms)"


def gaps(extra_s, hidden_s=0.001):
    """19 ms a token alone; in a full pipeline 21 ms, and a part of the extra time is hidden."""
    return TokenGaps(0.019 + extra_s, 0.021 + max(0.0, extra_s - hidden_s))


@pytest.mark.parametrize("extra_s", [0.0024, 0.005])
def test_extra_time_is_found_again(extra_s):
    assert extra_time(gaps(extra_s), gaps) == pytest.approx(extra_s, rel=0.02)


def test_a_full_pipeline_may_show_more_than_requests_alone():
    measured = TokenGaps(gaps(0.002).alone_s, gaps(0.003).full_s)
    assert extra_time(measured, gaps) == pytest.approx(0.003, rel=0.02)


def test_a_full_pipeline_does_not_make_it_less():
    measured = TokenGaps(gaps(0.002).alone_s, gaps(0.0).full_s)
    assert extra_time(measured, gaps) == pytest.approx(0.002)


@pytest.mark.parametrize("alone_s", [0.019, 0.0188])
def test_what_is_hidden_is_none(alone_s):
    assert extra_time(TokenGaps(alone_s, 0.030), gaps) == 0.0


def test_a_full_pipeline_has_a_micro_batch_for_each_request():
    assert [r.prompt_tokens for r in full(4, 2048)] == [2048] * 4


def test_it_passes_between_a_completion_and_the_next_schedule():
    before, after = GPU_SERVER.model_dump(), slower(GPU_SERVER, 0.002).model_dump()
    changed = {name: after[name] - before[name] for name in before if after[name] != before[name]}
    assert changed == {"update_s": pytest.approx(0.002)}
    with pytest.raises(ValueError, match="less than or equal to 10"):
        slower(GPU_SERVER, 11.0)


def test_another_host_is_all_that_changes():
    spec = make_spec({"workload": {"name": "random", "rate": 1.0, "num_prompts": 1}}, "stock")
    other = with_host(spec, slower(spec.host, 0.001))
    assert other != spec
    assert other.model_copy(update={"host": spec.host}) == spec


def test_requests_alone_do_not_meet():
    slowest_s = 0.3  # a token
    gaps = [b.arrival_s - a.arrival_s for a, b in zip(alone(), alone()[1:], strict=False)]
    assert min(gaps) > slowest_s * max(r.output_tokens for r in alone())
    assert len({r.request_id for r in alone()}) == len(alone())


def ran(tpot_s):
    return measure([RequestRecord("r", 0.0, 1.0, 1.0 + 99 * tpot_s, 10, 100)])


def virtual(spec, requests):
    """22 ms a token, and what the host takes beyond a GPU server's."""
    return ran(0.022 + spec.host.update_s - GPU_SERVER.update_s)


@pytest.mark.parametrize(("real_s", "code"), [(0.0246, 0), (0.0275, 1)])
def test_a_run_is_judged_beside_this_machines_host(monkeypatch, tmp_path, capsys, real_s, code):
    """2.4 ms a round: 24.6 ms is 12 % from a GPU server's host, 1 % from this machine's."""
    served = Served(gaps(0.0024), ran(real_s))
    monkeypatch.setattr(check, "on_the_wall_clock", lambda spec, requests: served)
    monkeypatch.setattr(check, "in_virtual_time", virtual)
    monkeypatch.setattr(check, "virtual_gaps", lambda spec, extra_s: gaps(extra_s))
    out = tmp_path / "figures.json"
    words = ["--workload", "random", "--rate", "1", "--num-prompts", "3", "--out", str(out)]
    assert check.main([*words, "--policy", "stock:2048", "--mode", "sync"]) == code
    assert "ms more a round than a GPU server's" in capsys.readouterr().out
    kept = json.loads(out.read_text())
    assert kept["extra host time a round (ms)"] == pytest.approx(2.4, rel=0.02)
    assert kept["figures"][NAME]["virtual"] == pytest.approx(24.4, rel=0.002)
    assert kept["figures beside the host of a GPU server"][NAME]["virtual"] == pytest.approx(22.0)
