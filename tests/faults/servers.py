"""Wall-clock servers that faults are put to, what is sent to them, and what is due.

BENCH_FAULTS set to long means large sizes; else seconds each.
"""

import os
import time
import urllib.request
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

from bench.policies import parse_policy
from bench.wall_clock.client import send_all
from bench.wall_clock.launch import BLOCK_TOKENS, Deployment
from bench.wall_clock.running import ServerOptions, server_of
from bench.wall_clock.settings import WallClockSettings
from bench.wall_clock.tokens import prompt_digest, token_at

LIMIT_S = 280.0
WORDS = ("running", "waiting")


@dataclass(frozen=True)
class Pressure:
    """More than the KV cache holds, for a while: lengths in tokens, times in seconds."""

    rate: float
    seconds: float
    prompt: tuple[int, int]
    output: tuple[int, int]
    preempting_s: float  # from the first preemption to the last, at least


@dataclass(frozen=True)
class Scale:
    """How much of each fault."""

    leaving: int  # requests, of which a tenth leaves
    rate: float
    tiny: int
    long_prompt: int  # tokens
    chats: int
    crowd: int  # requests that exhaust the KV cache at once
    pressure: Pressure
    kv_cache_gib: float
    policy: str


LONG = os.environ.get("BENCH_FAULTS") == "long"
SHORT_SCALE = Scale(
    leaving=120,
    rate=20.0,
    tiny=300,
    long_prompt=20_000,
    chats=20,
    crowd=48,
    pressure=Pressure(20.0, 5.0, (300, 700), (150, 250), 0.0),
    kv_cache_gib=2.0,
    policy="ours:balanced/auto,profiling.max_seconds=20.0",
)
LONG_SCALE = Scale(
    leaving=2000,
    rate=30.0,
    tiny=10_000,
    long_prompt=100_000,
    chats=200,
    crowd=500,
    pressure=Pressure(4.5, 180.0, (800, 2000), (600, 1000), 120.0),
    kv_cache_gib=8.0,
    policy="ours:balanced/auto",
)
SCALE = LONG_SCALE if LONG else SHORT_SCALE


def prompt(rng, low, high):
    """Random token ids."""
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
    """Four stages, and contexts as long as the KV cache holds."""
    settings = WallClockSettings(kv_cache_gib=SCALE.kv_cache_gib)
    # Bytes a token and layer, layers a stage; vLLM keeps a block for itself.
    fits = settings.kv_cache_bytes // (4096 * 16) - 2 * BLOCK_TOKENS
    deployment = Deployment(parse_policy(policy), folder, settings=settings, max_model_len=fits)
    return server_of(deployment, ServerOptions(folder / "server.log"))


def log_of(server):
    """All the server has said."""
    return server.log.read_text(errors="replace")


def send(server, calls, limit_s=LIMIT_S):
    """Answers, each within `limit_s`; tells how many and how long."""
    started_s = time.monotonic()
    answers = send_all(server.url, str(server.model), calls, limit_s)
    left = sum(a.left for a in answers)
    print(f"{len(calls)} sent, {len(answers) - left} answered, {left} left", end=", ")
    print(f"{time.monotonic() - started_s:.1f} s")
    return answers


def value(server, name, **labels):
    """Sum of a series with these labels on the server's page. Raises LookupError without any."""
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=10) as answer:
        families = text_string_to_metric_families(answer.read().decode())
    samples = (s for family in families for s in family.samples if s.name == name)
    found = [s.value for s in samples if labels.items() <= s.labels.items()]
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
