"""Faults on a real server over wall-clock stages: every request is answered or reported.

What a request should get is known: its tokens depend on its prompt and nothing else.
"""

import json
import os
import random
import signal
import threading
import time

import pytest

pytest.importorskip("vllm")

from bench.measures import measure
from bench.policies import parse_policy
from bench.sim_spec import SimSpec
from bench.sim_world import build_workload
from bench.wall_clock.client import Call, send_all
from bench.wall_clock.running import wait_for_profile
from bench.wall_clock.runs import calls_of, in_virtual_time, records_of
from tests.faults.processes import session_pids, wait_until_gone
from tests.faults.servers import (
    LONG,
    SCALE,
    check,
    log_of,
    prompt,
    send,
    served,
    value,
    wait_until_idle,
)
from tests.faults.watched import Watched
from vllm_ppbalance.profile_store import SAVE_EVERY_S

pytestmark = pytest.mark.real_vllm


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """Under the default policy, its stage times measured before the first request."""
    folder = tmp_path_factory.mktemp("faults")
    with served(SCALE.policy, folder) as running:
        wait_for_profile(running.log)
        assert "ppbalance: measured" in log_of(running)
        yield running
        assert "ppbalance failed" not in log_of(running)


def test_it_takes_the_time_that_virtual_time_says(server):
    """Within what a busy machine may add; `bench.wall_clock.check` is the exact comparison."""
    sent = {"name": "random", "rate": 3.0, "num_prompts": 24}
    sent |= {"prompt_range": [64, 1024], "output_range": [16, 64]}
    policy = parse_policy(SCALE.policy).model_dump()
    fields = {"workload": sent, "policy": policy, "kv_cache_gib": SCALE.kv_cache_gib}
    spec = SimSpec.parse(fields)
    requests = build_workload(spec)
    real = measure(records_of(send(server, calls_of(requests))))
    virtual = in_virtual_time(spec, requests)
    print(f"mean TPOT {real.tpot_s.mean:.4f} s, in virtual time {virtual.tpot_s.mean:.4f} s")
    assert 0.9 < real.tpot_s.mean / virtual.tpot_s.mean < 1.6
    assert real.output_tok_per_s > 0.8 * virtual.output_tok_per_s


def test_clients_that_leave_mid_stream(server):
    rng = random.Random(1)
    calls = [
        Call(
            f"l{i}",
            i / SCALE.rate,
            prompt(rng, 16, 400),
            rng.randint(8, 48),
            leave_after=rng.randint(1, 6) if i % 10 == 0 else None,
        )
        for i in range(SCALE.leaving)
    ]
    answers = send(server, calls)
    check(answers)
    assert sum(answer.left for answer in answers) == SCALE.leaving // 10
    wait_until_idle(server)
    assert value(server, "vllm:kv_cache_usage_perc") == 0.0


def test_many_tiny_requests(server):
    calls = [Call(f"t{i}", i / 400.0, (4 + i % 250,), 1) for i in range(SCALE.tiny)]
    check(send(server, calls))


def test_a_long_prompt_into_running_chats(server):
    rng = random.Random(2)
    chats = [Call(f"c{i}", 0.02 * i, prompt(rng, 50, 200), 60) for i in range(SCALE.chats)]
    long = Call("long", 0.01 * SCALE.chats, prompt(rng, *[SCALE.long_prompt] * 2), 4)
    check(send(server, [*chats, long]))


def test_a_crowd_that_does_not_fit_the_kv_cache(server):
    """Several times the cache at once: they wait and are preempted, none is lost."""
    rng = random.Random(3)
    calls = [
        Call(f"k{i}", 0.0, prompt(rng, 600, 1400), rng.randint(100, 300))
        for i in range(SCALE.crowd)
    ]
    check(send(server, calls))
    wait_until_idle(server)
    assert value(server, "vllm:num_preemptions_total") > 0


@pytest.mark.timeout(1200)
def test_a_kv_cache_that_is_exhausted_for_long(server):
    """More comes than fits, minutes long with BENCH_FAULTS=long: none waits for ever."""
    rng, load = random.Random(7), SCALE.pressure
    calls = [
        Call(f"p{i}", i / load.rate, prompt(rng, *load.prompt), rng.randint(*load.output))
        for i in range(int(load.rate * load.seconds))
    ]
    with Watched(server, every_s=0.4 + 0.01 * load.seconds) as watched:
        answers = send(server, calls, limit_s=900.0)
    print(f"{watched.preemptions} preemptions within {watched.preempting_s:.0f} s", end=", ")
    print(f"with predictions {watched.share_predicting:.0%} of the time")
    check(answers)
    assert watched.preemptions > 0
    assert watched.preempting_s >= load.preempting_s
    assert not watched.ever_stock
    assert watched.share_predicting > 0.5
    wait_until_idle(server)
    assert value(server, "vllm:kv_cache_usage_perc") == 0.0


def under_load(server, act):
    """Sends requests, calls `act` in the middle; the answers."""
    rng = random.Random(4)
    calls = [Call(f"s{i}", 0.02 * i, prompt(rng, 50, 400), 400) for i in range(60)]
    timer = threading.Timer(2.5, act)
    timer.start()
    answers = send_all(server.url, str(server.model), calls, 60.0)
    timer.join()
    return answers


def test_sigterm_under_load_leaves_no_process_and_what_was_learnt(server):
    """The last test of this server. vLLM lets what runs finish; what comes later is refused."""
    session, process = server.process.pid, server.process
    told_at = []

    def terminate():
        told_at.append(time.time())
        process.send_signal(signal.SIGTERM)

    answers = under_load(server, terminate)
    (profile,) = (server.log.parent / "profiles").glob("*/*.json")
    lost_s = told_at[0] - json.loads(profile.read_text())["saved_at"]
    assert lost_s < SAVE_EVERY_S + 10.0, f"saved {lost_s:.0f} s before SIGTERM"
    assert all(answer.finished or answer.error for answer in answers)
    assert process.wait(60) is not None
    left = wait_until_gone(session, 20.0)
    print(f"{sum(a.finished for a in answers)} answered, the others reported; left: {left}")
    assert not left


@pytest.mark.skipif(not LONG, reason="two more servers: BENCH_FAULTS=long")
@pytest.mark.parametrize("policy", ["stock:2048", "ours:balanced/auto"])
def test_a_killed_worker_is_no_worse_than_with_stock(policy, tmp_path):
    with served(policy, tmp_path) as running:
        session, process = running.process.pid, running.process
        worker = next(p for p in session_pids(session) if "Worker_PP2" in session_pids(session)[p])
        killed_s = []

        def kill():
            killed_s.append(time.monotonic())
            os.kill(worker, signal.SIGKILL)

        answers = under_load(running, kill)
        told_s = time.monotonic() - killed_s[0]
        assert all(answer.finished or answer.error for answer in answers)
        code = process.wait(60)
        ended_s = time.monotonic() - killed_s[0]
        left = wait_until_gone(session, 20.0)
    print(f"{policy}: all told {told_s:.1f} s, exit {code} {ended_s:.1f} s after the kill; {left}")
    assert not left
