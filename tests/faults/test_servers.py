"""Faults on a real server over wall-clock stages: every request is answered or reported.

What a request should get is known: its tokens depend on its prompt and nothing else. BENCH_FAULTS
set to long runs large sizes, and a killed worker too; else seconds each.
"""

import os
import random
import signal
import threading
import time
import urllib.request
from dataclasses import dataclass

import pytest
from prometheus_client.parser import text_string_to_metric_families

pytest.importorskip("vllm")

from bench.measures import measure
from bench.policies import parse_policy
from bench.sim_spec import SimSpec
from bench.sim_world import build_workload
from bench.wall_clock.check import calls_of, in_virtual_time, records_of
from bench.wall_clock.client import Call, send_all
from bench.wall_clock.launch import BLOCK_TOKENS, Deployment
from bench.wall_clock.running import ServerOptions, server_of
from bench.wall_clock.settings import WallClockSettings
from bench.wall_clock.tokens import prompt_digest, token_at
from tests.faults.processes import session_pids, wait_until_gone

pytestmark = pytest.mark.real_vllm
LIMIT_S = 280.0
WORDS = ("running", "waiting")
POLICY = "ours:balanced/even_share,profiling.max_seconds=5.0"


@dataclass(frozen=True)
class Scale:
    """How much of each fault."""

    leaving: int  # requests, of which a tenth leaves
    rate: float
    tiny: int
    long_prompt: int  # tokens
    chats: int
    crowd: int  # requests that exhaust the KV cache
    kv_cache_gib: float


SCALES = {
    "short": Scale(120, 20.0, 300, 20_000, 20, 48, 2.0),
    "long": Scale(2000, 30.0, 10_000, 100_000, 200, 500, 8.0),
}
SCALE = SCALES[os.environ.get("BENCH_FAULTS", "short")]


def prompt(rng, low, high):
    return tuple(rng.choices(range(4, 260), k=rng.randint(low, high)))


def check(answers):
    """All are accounted for; what came is a prefix of what was due, all of it where nobody left."""
    for answer in answers:
        call = answer.call
        assert answer.error is None, (call.request_id, answer.error)
        assert answer.finished != answer.left
        digest = prompt_digest(call.prompt)
        due = [token_at(digest, i) for i in range(call.max_tokens)]
        assert answer.token_ids == (due if answer.finished else due[: len(answer.token_ids)])


def served(policy, folder):
    settings = WallClockSettings(kv_cache_gib=SCALE.kv_cache_gib)
    # Bytes a token and layer, layers a stage; vLLM keeps a block for itself.
    fits = settings.kv_cache_bytes // (4096 * 16) - 2 * BLOCK_TOKENS
    deployment = Deployment(parse_policy(policy), folder, settings=settings, max_model_len=fits)
    return server_of(deployment, ServerOptions(folder / "server.log"))


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("faults")
    with served(POLICY, folder) as running:
        yield running
        assert "ppbalance failed" not in running.log.read_text(errors="replace")


def send(server, calls):
    started_s = time.monotonic()
    answers = send_all(server.url, str(server.model), calls, LIMIT_S)
    left = sum(a.left for a in answers)
    print(f"{len(calls)} sent, {len(answers) - left} answered, {left} left", end=", ")
    print(f"{time.monotonic() - started_s:.1f} s")
    return answers


def value(server, name):
    """Sum of a series on the server's page. Raises LookupError where it has none."""
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=10) as answer:
        families = text_string_to_metric_families(answer.read().decode())
    found = [s.value for family in families for s in family.samples if s.name == name]
    if not found:
        raise LookupError(name)
    return sum(found)


def wait_until_idle(server, limit_s=60.0):
    """Nothing runs or waits: what the clients left behind is gone."""
    deadline_s = time.monotonic() + limit_s
    while time.monotonic() < deadline_s:
        busy = sum(value(server, f"vllm:num_requests_{word}") for word in WORDS)
        if not busy:
            return
        time.sleep(0.3)
    raise AssertionError(f"{busy} requests still there after {limit_s} s")


def test_it_takes_the_time_that_virtual_time_says(server):
    """Within what a busy machine may add; `bench.wall_clock.check` is the exact comparison."""
    sent = {"name": "random", "rate": 3.0, "num_prompts": 24}
    sent |= {"prompt_range": [64, 1024], "output_range": [16, 64]}
    policy = parse_policy(POLICY).model_dump()
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


def under_load(server, act):
    """Sends requests, calls `act` in the middle; the answers."""
    rng = random.Random(4)
    calls = [Call(f"s{i}", 0.02 * i, prompt(rng, 50, 400), 400) for i in range(60)]
    timer = threading.Timer(2.5, act)
    timer.start()
    answers = send_all(server.url, str(server.model), calls, 60.0)
    timer.join()
    return answers


def test_sigterm_under_load_leaves_no_process(server):
    """The last test of this server. vLLM lets what runs finish; what comes later is refused."""
    session, process = server.process.pid, server.process
    answers = under_load(server, lambda: process.send_signal(signal.SIGTERM))
    assert all(answer.finished or answer.error for answer in answers)
    assert process.wait(60) is not None
    left = wait_until_gone(session, 20.0)
    print(f"{sum(a.finished for a in answers)} answered, the others reported; left: {left}")
    assert not left


@pytest.mark.skipif(SCALE is SCALES["short"], reason="two more servers: BENCH_FAULTS=long")
@pytest.mark.parametrize("policy", ["stock:2048", "ours:balanced/even_share"])
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
