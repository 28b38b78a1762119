"""Deterministic greedy requests, all sent at once, to compare two servers token by token."""

import json
import random
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

FIRST_PLAIN_TOKEN = 4  # after the tiny model's special tokens
VOCABULARY = 260
REQUEST_LIMIT_S = 180.0


@dataclass(frozen=True, slots=True)
class GreedyRequest:
    """A prompt in token ids and how many tokens to generate, end of sequence ignored."""

    prompt: tuple[int, ...]
    max_tokens: int


def greedy_requests(count: int, seed: int = 0) -> list[GreedyRequest]:
    """Prompts of 8 to 400 tokens with outputs of 16 to 64, so that they chunk and overlap."""
    rng = random.Random(seed)
    return [
        GreedyRequest(
            tuple(rng.choices(range(FIRST_PLAIN_TOKEN, VOCABULARY), k=rng.randint(8, 400))),
            rng.randint(16, 64),
        )
        for _ in range(count)
    ]


def complete(url: str, model: str, request: GreedyRequest) -> list[int]:
    """Token ids of one greedy completion by a server at `url`."""
    body = {
        "model": model,
        "prompt": request.prompt,
        "max_tokens": request.max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    call = urllib.request.Request(
        f"{url}/v1/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(call, timeout=REQUEST_LIMIT_S) as answer:
        tokens: list[int] = json.load(answer)["choices"][0]["token_ids"]
    return tokens


def complete_all(url: str, model: str, requests: Sequence[GreedyRequest]) -> list[list[int]]:
    """Completions of all requests, sent concurrently, in the order of the requests."""
    with ThreadPoolExecutor(len(requests)) as pool:
        return list(pool.map(lambda request: complete(url, model, request), requests))


def first_difference(left: Sequence[Sequence[int]], right: Sequence[Sequence[int]]) -> str | None:
    """Where two servers' outputs first differ, in words; None if they are identical."""
    for number, (ours, theirs) in enumerate(zip(left, right, strict=True)):
        if list(ours) != list(theirs):
            pairs = zip(ours, theirs, strict=False)
            place = next(
                (i for i, (a, b) in enumerate(pairs) if a != b), min(len(ours), len(theirs))
            )
            return (
                f"request {number}, token {place}: {ours[place:][:4]} against {theirs[place:][:4]}"
            )
    return None
