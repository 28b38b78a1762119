"""Sends one cell after the other to a running server with vLLM's own client."""

import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench.measures import Slo
from bench.openai_server import ServedModel, flush_prefix_cache
from bench.serve_cells import Cell, key_of
from bench.served_record import append, is_finished, judged, load, make_record
from bench.timed_trace import BLOCK_TOKENS, write_stand_in_tokenizer, write_trace
from bench.vllm_client import client, read_result, replay_command, wait_for

CLIENT_START_S = 600.0  # importing vLLM on a busy machine


@dataclass(frozen=True, slots=True)
class ServeRun:
    """All that is the same for the cells. `tokenizer` None takes a stand-in; times in seconds."""

    server: ServedModel
    label: str
    out: Path
    slo: Slo
    tokenizer: str | None = None
    num_warmups: int = 0
    drain_limit_s: float = 1800.0


@dataclass(frozen=True, slots=True)
class Watch:
    """What is told while cells run: a line of text, and (cell, requests answered)."""

    say: Callable[[str], None]
    answered: Callable[[Cell, int], None]


def serve_cells(
    run: ServeRun, cells: Sequence[Cell], watch: Watch
) -> Iterator[tuple[Cell, dict[str, Any]]]:
    """Each cell with its record, as it is done; one that is finished in the file is not run again.

    Raises RuntimeError where the client fails or nothing is answered.
    """
    stored = {record["key"]: record for record in load(run.out) if is_finished(record)}
    keys = {cell: key_of(cell, run.label, run.server, run.tokenizer) for cell in cells}
    warm = run.num_warmups == 0
    with tempfile.TemporaryDirectory(prefix="bench-serve-") as scratch:
        sender = _Sender(run, Path(scratch), watch)
        for cell in cells:
            if (record := stored.get(keys[cell])) is not None:
                yield cell, judged(record, run.slo)
                continue
            if not warm:
                sender.warm_up(cell)
                warm = True
            sender.flush()
            yield cell, sender.measure(cell, keys[cell])


class _Sender:
    def __init__(self, run: ServeRun, scratch: Path, watch: Watch) -> None:
        self._run = run
        self._scratch = scratch
        self._watch = watch
        self._can_flush = True
        stand_in = write_stand_in_tokenizer(scratch / "tokenizer")
        self._tokenizer = run.tokenizer or str(stand_in)

    def flush(self) -> None:
        """Empties the prefix cache, or says once why that cannot be done."""
        if not self._can_flush:
            return
        problem = flush_prefix_cache(self._run.server.url)
        if problem is not None:
            self._can_flush = False
            self._watch.say(
                f"The server's prefix cache is not flushed between runs: {problem}. No two runs "
                "share a prompt block, so this leaves old blocks to evict, not hits."
            )

    def warm_up(self, cell: Cell) -> None:
        """The first requests of a cell at once, with other tokens; what they take is not kept."""
        first = [replace(r, arrival_s=0.0) for r in cell.requests[: self._run.num_warmups]]
        warm_up = Cell(cell.workload, tuple(first))
        self._watch.say(f"Warming up with {len(first)} requests")
        result, _ = self._send(warm_up, salt=cell.salt("warm-up"), watch=False)
        _check_answered("warm-up", result)

    def measure(self, cell: Cell, key: str) -> dict[str, Any]:
        """One cell, its record written."""
        result, command = self._send(cell, salt=cell.salt(), watch=True)
        _check_answered(cell.name, result)
        run = self._run
        record = make_record(cell, run.label, key, run.server, run.slo, result, command)
        append(run.out, record)
        return record

    def _send(self, cell: Cell, salt: int, watch: bool) -> tuple[dict[str, Any], list[str]]:
        trace, result = self._scratch / "trace.jsonl", self._scratch / "result.json"
        log = self._run.out.with_suffix(".client.log")
        count = len(cell.requests)
        write_trace(cell.requests, trace, salt)
        result.unlink(missing_ok=True)
        server = self._run.server
        command = [
            *replay_command(server.url, server.model, trace, count, BLOCK_TOKENS, result),
            *_options(self._tokenizer),
        ]
        limit_s = CLIENT_START_S + cell.span_s + self._run.drain_limit_s
        with client(command, log) as process:
            wait_for(
                process,
                log,
                limit_s,
                lambda done: self._watch.answered(cell, done) if watch else None,
            )
        return read_result(result), [_name(word, self._scratch) for word in command]


def _check_answered(name: str, result: Mapping[str, Any]) -> None:
    if not result["completed"]:
        error = next(filter(None, result["errors"]), "no answer").strip().splitlines()[-1]
        raise RuntimeError(f"{name}: no request was answered: {error}")


def _options(tokenizer: str) -> list[str]:
    return ["--tokenizer", tokenizer, "--save-detailed"]


def _name(word: str, scratch: Path) -> str:
    """A word of the command without this machine's folders."""
    if word == sys.executable:
        return "python"
    if word == str(scratch):
        return "."
    return Path(word).name if word.startswith(str(scratch)) else word
