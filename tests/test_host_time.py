"""This machine's host time: found with requests alone, told, and put into the simulated run."""

import json

import pytest

from bench.cli_options import make_spec
from bench.measures import RequestRecord, measure
from bench.sim_spec import HostModel
from bench.wall_clock import check
from bench.wall_clock.host_time import alone, extra_time, slower
from bench.wall_clock.runs import Served, with_host

GPU_SERVER = HostModel()
NAME = "mean TPOT (ms)"


def test_what_shows_is_the_extra_time_and_what_is_hidden_is_none():
    assert extra_time(0.0214, 0.0190) == pytest.approx(0.0024)
    assert extra_time(0.0190, 0.0190) == 0.0
    assert extra_time(0.0188, 0.0190) == 0.0


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
    """19 ms a token alone, 22 ms under load, and what the host takes beyond a GPU server's."""
    busy = len(requests) != len(alone())
    return ran(0.019 + 0.003 * busy + spec.host.update_s - GPU_SERVER.update_s)


@pytest.mark.parametrize(("real_s", "code"), [(0.0246, 0), (0.0275, 1)])
def test_a_run_is_judged_beside_this_machines_host(monkeypatch, tmp_path, capsys, real_s, code):
    """2.4 ms a round: 24.6 ms is 12 % from a GPU server's host, 1 % from this machine's."""
    served = Served(0.0214, ran(real_s))
    monkeypatch.setattr(check, "on_the_wall_clock", lambda spec, requests: served)
    monkeypatch.setattr(check, "in_virtual_time", virtual)
    out = tmp_path / "figures.json"
    words = ["--workload", "random", "--rate", "1", "--num-prompts", "3", "--out", str(out)]
    assert check.main([*words, "--policy", "stock:2048", "--mode", "sync"]) == code
    assert "this host takes 2.40 ms more a round" in capsys.readouterr().out
    kept = json.loads(out.read_text())
    assert kept["extra host time a round (ms)"] == pytest.approx(2.4)
    assert kept["figures"][NAME]["virtual"] == pytest.approx(24.4)
    assert kept["figures beside the host of a GPU server"][NAME]["virtual"] == pytest.approx(22.0)
