"""What the real runs share: the stock reference, the policy combinations and their marks."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from bench.greedy_check import FIRST_PLAIN_TOKEN, VOCABULARY, GreedyRequest

FIXED_TOKENS = 48
# Given only where predictions are not followed, and by `alp` before its first decision: so small
# that the lone prompt does not end before.
FALLBACK_TOKENS = 128
ALP_MIN, ALP_MAX = 192, 2048
FIRST_CHUNK = 64  # of equal latency
CHUNKS: dict[str, dict[str, Any]] = {
    "fixed": {"strategy": "fixed", "fixed_tokens": FIXED_TOKENS},
    "greedy": {"strategy": "greedy"},
    "throttle": {"strategy": "throttle"},
}
# They predict, with the model of `switching.py`.
PREDICTIVE: dict[str, dict[str, Any]] = {
    "alp": {
        "strategy": "alp",
        "fallback_tokens": FALLBACK_TOKENS,
        "kv_free_threshold": 0.0,
        "alp_chunk_min": ALP_MIN,
        "alp_chunk_max": ALP_MAX,
        "alp_chunk_step": 64,
    },
    "spread": {"strategy": "spread", "fallback_tokens": FALLBACK_TOKENS, "spread_min_chunk": 8},
    "balanced": {
        "strategy": "balanced",
        "fallback_tokens": FALLBACK_TOKENS,
        "balanced_min_chunk": 8,
    },
    "equal_latency": {
        "strategy": "equal_latency",
        "equal_first_chunk": FIRST_CHUNK,
        "equal_alignment": 16,
    },
}
REBALANCES: dict[str, dict[str, Any]] = {
    "off": {"strategy": "off"},
    "even_share": {"strategy": "even_share"},
    "threshold": {"strategy": "threshold", "delay_threshold": 2},
    "tiered": {"strategy": "tiered", "base_unit": 2, "waiting_tok_threshold": 1 << 30},
    "auto": {"strategy": "auto", "margin": 0.001},
}
COMBINATIONS = [
    *((chunk, other) for chunk in CHUNKS for other in ("off", "even_share", "threshold")),
    ("alp", "auto"),
    ("spread", "tiered"),
    ("balanced", "auto"),
    ("equal_latency", "even_share"),
]
# So short that every prompt is late at once, however fast the machine: `alp` then takes the largest
# chunk that keeps the TPOT target, by the model.
HURRY_S = 1e-6


@dataclass(frozen=True)
class Reference:
    """Stock vLLM's tokens, which every other run must repeat, and its log."""

    requests: list[GreedyRequest]
    tokens: list[list[int]]
    lone: GreedyRequest  # sent on its own
    lone_tokens: list[list[int]]  # of that one request
    log: str


def lone_request(prompt_tokens: int) -> GreedyRequest:
    """A request that is to be served alone: no other prompt waits while its own is computed."""
    random = Random(prompt_tokens)
    prompt = random.choices(range(FIRST_PLAIN_TOKEN, VOCABULARY), k=prompt_tokens)
    return GreedyRequest(tuple(prompt), max_tokens=8)


def combinations() -> Iterator[tuple[str, dict[str, Any]]]:
    """Name and settings of each combination."""
    chunks = CHUNKS | PREDICTIVE
    for chunk, rebalance in COMBINATIONS:
        settings: dict[str, Any] = {"chunk": chunks[chunk], "rebalance": REBALANCES[rebalance]}
        if chunk == "alp":
            settings["slo_ttft"] = HURRY_S
        if chunk == "balanced":
            settings["slo_tpot"] = 2.0  # by the model of `switching.py`, 0.2 s leaves two sizes
        yield f"{chunk}-{rebalance}", settings


def is_for_lone_prompts(name: str) -> bool:
    """Whether a combination is to serve the lone request too."""
    return name.startswith(("alp", "equal_latency"))


def switch_to(file: Path, name: str, settings: dict[str, Any]) -> None:
    """Asks the switching scheduler for `settings`; the file is never seen half written."""
    new = file.with_suffix(".new")
    new.write_text(json.dumps({"name": name, "settings": settings}))
    new.replace(file)


def check_rows(steps: Path) -> None:
    """Each combination ran, none failed, and the policies had an effect."""
    rows = [json.loads(line) for line in steps.read_text().splitlines()]
    assert not any(row["failed"] for row in rows)
    moves = dict.fromkeys(REBALANCES, 0)
    for name, _ in combinations():
        own = [row for row in rows if row["policy"] == name]
        assert own, f"{name} never ran"
        check_chunks(name.split("-")[0], own)
        moves[name.split("-")[1]] += own[-1]["moves"]
    assert moves.pop("off") == 0
    assert all(moves.values()), moves


def check_chunks(chunk: str, rows: list[dict[str, Any]]) -> None:
    """A chunk strategy did what it is for; nothing here depends on how fast the machine is."""
    prefills = [row["tokens"] for row in rows if row["prefills"]]
    reasons = {row["reason"] for row in rows}
    made = [row for row in rows if row["budget"] is not None]
    by_reason = {r: {row["budget"] for row in made if row["reason"] == r} for r in reasons}
    if chunk == "fixed":
        assert max(prefills) <= FIXED_TOKENS
    elif chunk == "greedy":
        assert prefills[0] <= 128  # it starts at its smallest chunk
    elif chunk == "alp":
        # Behind a long prefix not even the least candidate may keep the target, by the model.
        bound = "tpot bound"
        assert {bound} <= reasons <= {bound, f"{bound}: none keeps it", "nothing waits"}
        # By the model's times: neither the fallback, nor what the bound would allow without them.
        assert ALP_MIN <= min(by_reason[bound]) <= max(by_reason[bound]) < ALP_MAX
    elif chunk == "spread":
        assert reasons <= {"backlog", "throughput cap", "smallest chunk"}
        assert len({row["budget"] for row in made}) > 2
    elif chunk == "balanced":
        assert not any(reason.startswith("fallback") for reason in reasons)
        assert len({row["budget"] for row in made}) > 1
    elif chunk == "equal_latency":
        assert reasons <= {"equal latency", "in company", "no prompt", "short rest"}
        # The lone prompt begins with the whole first chunk, and its later ones are smaller.
        alone = [row for row in made if row["running"] == 1 and not row["decodes"]]
        chunks = {row["budget"] for row in alone if row["reason"] == "equal latency"}
        assert min(chunks) < FIRST_CHUNK == max(chunks)
