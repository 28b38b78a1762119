"""On-time admission in front of vLLM's real scheduler, over stages in virtual time."""

import pytest

from bench.engine_types import RequestSpec
from tests.worlds import MODES, serve

pytestmark = pytest.mark.scheduler
SLO_TTFT = 0.5
WARM = 60  # decodes run this many steps before the burst: the cost model has to trust itself


def requests():
    """A burst of four times what can be computed in time, then a trickle behind it."""
    warm = [RequestSpec(f"w{i}", 0.0, 40 + 40 * i, 120) for i in range(8)]
    burst = [RequestSpec(f"b{i}", 1.0, 500 + 50 * (i % 20), 4) for i in range(200)]
    after = [RequestSpec(f"a{i}", 1.2 + 0.05 * i, 300, 4) for i in range(20)]
    return [*warm, *burst, *after]


def served(admission, mode, **options):
    own = {
        "slo_ttft": SLO_TTFT,
        "chunk": {"strategy": "balanced"},
        "rebalance": {"strategy": "off"},
        "admission": {"strategy": admission},
        "profiling": {"mode": "off"},
    }
    config = {"ppbalance": own}
    return serve(
        requests(), pp_size=4, additional_config=config, max_num_seqs=256, **mode, **options
    )


def in_time(ran):
    return sum(
        record.first_token_s - record.arrival_s <= SLO_TTFT
        for record in ran.result.requests.values()
    )


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
def test_in_overload_more_requests_are_in_time_and_none_is_lost(mode, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "fcfs"))
    fcfs = served("fcfs", mode)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "on_time"))  # nothing learnt by the other
    on_time = served("on_time", mode)
    assert on_time.tokens == fcfs.tokens
    assert all(record.finished for record in on_time.result.requests.values())
    assert not on_time.scheduler.ppbalance_failed
    assert in_time(on_time) >= in_time(fcfs) + 15


def test_priorities_of_the_user_are_left_alone(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    ran = served("on_time", MODES["sync"], policy="priority")
    assert ran.scheduler.ppbalance.admission is None
    assert all(record.finished for record in ran.result.requests.values())
