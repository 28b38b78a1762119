"""What the real runs share: the stock reference, the policy combinations and their marks."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.greedy_check import GreedyRequest

FIXED_TOKENS = 48
CHUNKS: dict[str, dict[str, Any]] = {
    "fixed": {"strategy": "fixed", "fixed_tokens": FIXED_TOKENS},
    "greedy": {"strategy": "greedy"},
    "throttle": {"strategy": "throttle"},
}
REBALANCES: dict[str, dict[str, Any]] = {
    "off": {"strategy": "off"},
    "even_share": {"strategy": "even_share"},
    "threshold": {"strategy": "threshold", "delay_threshold": 2},
}


@dataclass(frozen=True)
class Reference:
    """Stock vLLM's tokens, which every other run must repeat, and its log."""

    requests: list[GreedyRequest]
    tokens: list[list[int]]
    log: str


def combinations() -> Iterator[tuple[str, dict[str, Any]]]:
    """Name and settings of each combination."""
    for chunk, chunk_settings in CHUNKS.items():
        for rebalance, rebalance_settings in REBALANCES.items():
            yield (
                f"{chunk}-{rebalance}",
                {"chunk": chunk_settings, "rebalance": rebalance_settings},
            )


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
        prefills = [row["tokens"] for row in own if row["prefills"]]
        if name.startswith("fixed"):
            assert max(prefills) <= FIXED_TOKENS, name
        elif name.startswith("greedy"):
            assert prefills[0] <= 128, name  # greedy starts at its smallest chunk
        moves[name.split("-")[1]] += own[-1]["moves"]
    assert moves.pop("off") == 0
    assert all(moves.values()), moves
