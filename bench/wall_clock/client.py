"""Real clients of a server: streaming completions at their own times, over HTTP."""

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from aiohttp.http_exceptions import HttpProcessingError

LONGEST_LINE = 1 << 24  # bytes


@dataclass(frozen=True, slots=True)
class Call:
    """One request. `leave_after` tokens the client closes the connection; None for never."""

    request_id: str
    send_s: float
    prompt: tuple[int, ...] | str
    max_tokens: int
    leave_after: int | None = None


@dataclass(slots=True)
class Answer:
    """What the client saw; seconds from the start of the run. `error` is why it has no answer."""

    call: Call
    first_token_s: float | None = None
    last_token_s: float | None = None
    token_ids: list[int] = field(default_factory=list)
    finished: bool = False
    left: bool = False
    error: str | None = None


async def _stream(session: aiohttp.ClientSession, body: dict[str, Any], answer: Answer) -> None:
    started_s = body.pop("started_s")
    async with session.post("/v1/completions", json=body) as response:
        if response.status != 200:
            answer.error = f"HTTP {response.status}: {(await response.text())[:300]}"
            return
        async for line in response.content:
            if not line.startswith(b"data: "):
                continue
            if line.startswith(b"data: [DONE]"):
                answer.finished = answer.error is None
                return
            chunk = json.loads(line[6:])
            if "error" in chunk:
                answer.error = str(chunk["error"])[:300]
                continue
            tokens = chunk["choices"][0].get("token_ids") or []
            if not tokens:
                continue
            answer.last_token_s = time.monotonic() - started_s
            if answer.first_token_s is None:
                answer.first_token_s = answer.last_token_s
            answer.token_ids += tokens
            leave_after = answer.call.leave_after
            if leave_after is not None and len(answer.token_ids) >= leave_after:
                answer.left = True
                return
    answer.error = answer.error or "the stream ended without [DONE]"


async def _one(
    session: aiohttp.ClientSession, model: str, call: Call, started_s: float, limit_s: float
) -> Answer:
    await asyncio.sleep(max(0.0, started_s + call.send_s - time.monotonic()))
    answer = Answer(call)
    body = {
        "model": model,
        "prompt": call.prompt,
        "max_tokens": call.max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
        "started_s": started_s,
    }
    try:
        async with asyncio.timeout(limit_s):
            await _stream(session, body, answer)
    except (aiohttp.ClientError, HttpProcessingError, ValueError, OSError) as error:
        answer.error = f"{type(error).__name__}: {error}"
    return answer


async def _all(url: str, model: str, calls: Sequence[Call], limit_s: float) -> list[Answer]:
    timeout = aiohttp.ClientTimeout(total=None)
    connector = aiohttp.TCPConnector(limit=0)
    # The first line of an answer repeats the prompt's token ids.
    async with aiohttp.ClientSession(
        url, connector=connector, timeout=timeout, read_bufsize=LONGEST_LINE
    ) as session:
        started_s = time.monotonic()
        return await asyncio.gather(
            *(_one(session, model, call, started_s, limit_s) for call in calls)
        )


def send_all(url: str, model: str, calls: Sequence[Call], limit_s: float = 300.0) -> list[Answer]:
    """Sends every call at its time; answers in the order of the calls, each within `limit_s`.

    An answer is finished, or its client left, or it carries an error: none is lost.
    """
    return asyncio.run(_all(url, model, calls, limit_s))
