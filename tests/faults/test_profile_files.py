"""Profile files that are broken, or written by two at once: refused, measured anew, left whole.

vLLM's real scheduler in virtual time; BENCH_FAULTS=long does the same to real servers.
"""

import json
import multiprocessing
from itertools import cycle

import pytest

pytest.importorskip("vllm")

from bench.policies import parse_policy
from bench.wall_clock.client import Call
from bench.wall_clock.launch import Deployment
from bench.wall_clock.running import ServerOptions, server_of, wait_for_profile
from bench.wall_clock.settings import WallClockSettings
from tests.faults.servers import LONG, check, log_of, send
from tests.worlds import MODES, batch_of, serve
from vllm_ppbalance.profile_store import ProfileStore

YEAR_S = 365 * 86_400.0
IDLE_S = 60.0  # longer than measuring may take
HURRY = {"warmups": 1, "repeats": 2, "max_seconds": 2.0}
# What is left of the file, by what became of it.
BROKEN = {
    "empty": lambda raw: b"",
    "one byte": lambda raw: raw[:1],
    "half": lambda raw: raw[: len(raw) // 2],
    "all but the end": lambda raw: raw[:-2],
    "zeros": lambda raw: bytes(len(raw)),
    "no text": lambda raw: b"\xff\xfe" + raw[2:],
    "brackets": lambda raw: b"[" * 200_000,
}
AT_SERVERS = ("empty", "half", "all but the end", "no text")
each_broken = pytest.mark.parametrize("broken", BROKEN)
real = pytest.mark.skipif(not LONG, reason="a server each: BENCH_FAULTS=long")


def whole(folder):
    """The only file in there, which loads. Raises ProfileRefusedError."""
    (path,) = folder.iterdir()
    store = ProfileStore(folder, json.loads(path.read_text())["deployment"])
    assert store.path == path
    store.load(YEAR_S)
    return path


def run(folder, mode, arrival_s, killed=False):
    """An engine that starts, serves some requests at `arrival_s`, and goes down or is killed."""
    config = {"ppbalance": {"profiling": {"directory": str(folder), **HURRY}}}
    load = batch_of(24, prompt=300, max_tokens=60, arrival_s=arrival_s)
    options = {"pp_size": 4, "max_num_batched_tokens": 1024, **MODES[mode]}
    ran = serve(load, additional_config=config, **options)
    assert not ran.scheduler.ppbalance_failed
    assert all(len(tokens) == 60 for tokens in ran.tokens.values())
    own = ran.scheduler.ppbalance
    if killed:
        own.saver._thread.join(10.0)  # what it has begun to write
    else:
        ran.scheduler.shutdown()
    return own


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """A file that an idle start has written, by mode."""
    folders = {mode: tmp_path_factory.mktemp(mode) for mode in ("sync", "async-v2")}
    for mode, folder in folders.items():
        run(folder, mode, IDLE_S)
    return {mode: whole(folder) for mode, folder in folders.items()}


@pytest.mark.scheduler
@pytest.mark.parametrize("mode", ["sync", "async-v2"])
@pytest.mark.parametrize("arrival_s", [0.0, IDLE_S], ids=["learns", "measures"])
@each_broken
def test_a_broken_file(measured, broken, arrival_s, mode, tmp_path):
    path = tmp_path / measured[mode].name
    path.write_bytes(BROKEN[broken](measured[mode].read_bytes()))
    own = run(tmp_path, mode, arrival_s)
    assert "no profile (it cannot be read: " in own.profile
    assert whole(tmp_path) == path


@pytest.mark.scheduler
@pytest.mark.parametrize("mode", ["sync", "async-v2"])
def test_a_broken_file_and_an_engine_that_is_killed(measured, mode, tmp_path):
    """As vLLM's server does to it on SIGTERM, unless it is given time."""
    path = tmp_path / measured[mode].name
    path.write_bytes(b"")
    run(tmp_path, mode, 0.0, killed=True)
    assert whole(tmp_path) == path


def start_and_save(folder, barrier):
    barrier.wait(60.0)
    assert "there is none yet" in run(folder, "async-v2", IDLE_S).profile


@pytest.mark.scheduler
def test_two_engines_that_start_at_once(tmp_path):
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(2)
    engines = [context.Process(target=start_and_save, args=(tmp_path, barrier)) for _ in "ab"]
    for engine in engines:
        engine.start()
    for engine in engines:
        engine.join(60.0)
    assert [engine.exitcode for engine in engines] == [0, 0]
    whole(tmp_path)
    assert "the saved profile" in run(tmp_path, "async-v2", 0.0).profile


def small_server(folder, name, measuring="auto"):
    """Two stages of few sizes to measure."""
    deployment = Deployment(
        parse_policy(f"ours:balanced/auto,profiling.mode={measuring},profiling.max_seconds=10.0"),
        folder,
        settings=WallClockSettings(kv_cache_gib=2.0),
        pp_size=2,
        max_num_seqs=64,
        max_num_batched_tokens=2048,
        max_model_len=8192,
    )
    return server_of(deployment, ServerOptions(folder / f"{name}.log"))


def use(server):
    """Some requests, all answered as due."""
    calls = [Call(f"r{i}", 0.05 * i, tuple(range(4, 64 + i)), 40) for i in range(24)]
    check(send(server, calls))
    assert "ppbalance failed" not in log_of(server)


def profiles(folder):
    (kept,) = (folder / "profiles").iterdir()
    return kept


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """The folder that two servers share which started at the same time, and their logs."""
    folder = tmp_path_factory.mktemp("shared")
    # One of them may be so much later that it would find the other's file.
    servers = [small_server(folder, name, "always") for name in "ab"]
    try:
        for server in servers:
            server.spawn()
        for server in servers:
            server.wait()
        for server in servers:
            wait_for_profile(server.log)
        for server in servers:
            use(server)
    finally:
        for server in servers:
            server.stop()
    return folder, [log_of(server) for server in servers]


@real
@pytest.mark.real_vllm
def test_two_servers_that_start_at_once_share_a_profile(pair):
    folder, logs = pair
    for log in logs:
        assert "no profile (a new one is asked for); being measured" in log
        assert "ppbalance: measured" in log
    whole(profiles(folder))
    with small_server(folder, "c") as third:
        use(third)
        assert "stage times: the saved profile" in log_of(third)
    whole(profiles(folder))


@real
@pytest.mark.real_vllm
@pytest.mark.parametrize(
    ("broken", "measures"), list(zip(AT_SERVERS, cycle([True, False]), strict=False))
)
def test_a_server_with_a_broken_file(pair, broken, measures, request):
    folder, _ = pair
    path = whole(profiles(folder))
    path.write_bytes(BROKEN[broken](path.read_bytes()))
    with small_server(folder, request.node.callspec.id) as server:
        assert "no profile (it cannot be read: " in log_of(server)
        if measures:
            wait_for_profile(server.log)
            assert "ppbalance: measured" in log_of(server)
        use(server)
    assert whole(profiles(folder)) == path
