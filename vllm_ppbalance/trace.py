"""The step log: one JSON line a micro-batch, written by a thread of its own.

The engine only appends to a bounded buffer; what finds no room, or no disk, is dropped and counted.
"""

import json
import logging
import threading
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

logger = logging.getLogger("vllm.ppbalance")

VERSION = 1
COLUMNS = (
    "step",
    "submitted_s",  # monotonic clock
    "start_s",  # when its first stage could begin: later than submitted_s if it waits for tokens
    "done_s",
    "stage_s",  # inferred time on the slowest stage
    "clear",  # 1 where stage_s is measured: the pipeline was full around it
    "predicted_s",  # by the cost model; null where there is none to trust
    "budget",  # tokens; null for vLLM's own
    "reason",
    "decodes",
    "decode_tokens",
    "decode_context",
    "prefills",  # [new tokens, tokens before them] of each prompt chunk
    "held",  # decodes this decision held back
    "waiting",  # requests not yet admitted when it came back
    "waiting_tokens",  # their prompt tokens
    "kv_free",  # share
    "ttft_s",  # this and the next three: sums since the start, as in LatencyTotals
    "first_tokens",
    "gap_s",
    "gaps",
)
Record = Sequence[Any]  # a value for each of COLUMNS
CAPACITY = 1 << 16  # records in the buffer, about 30 MB
FLUSH_S = 0.25
CLOSE_S = 2.0  # how long shutdown waits for a slow disk


class TraceWriter:
    """Appends records to `path` until it is closed; never raises and never waits in `append`.

    `header` is the file's first line. A failing disk gives one warning; later records are dropped.
    """

    def __init__(self, path: Path, header: dict[str, Any], capacity: int = CAPACITY) -> None:
        self.path = path
        self.dropped = 0  # records, since the start
        self._header = {"ppbalance_trace": VERSION, "columns": COLUMNS, **header}
        self._capacity = capacity
        self._buffer: deque[Record] = deque()
        self._failed = False
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ppbalance-trace", daemon=True)
        self._thread.start()

    def append(self, record: Record) -> None:
        """Keep a record for the writer, or count it as dropped."""
        if self._failed or len(self._buffer) >= self._capacity:
            self.dropped += 1
        else:
            self._buffer.append(record)

    @property
    def pending(self) -> int:
        """Records that are not written yet."""
        return len(self._buffer)

    def close(self, limit_s: float = CLOSE_S) -> None:
        """Write what is left, waiting for the disk at most `limit_s` seconds."""
        self._closing.set()
        self._thread.join(limit_s)

    def _run(self) -> None:
        try:
            # Opened here as well: a hanging file system must not hang the engine.
            with self.path.open("w", encoding="utf-8") as file:
                file.write(json.dumps(self._header) + "\n")
                file.flush()
                noted = 0
                while not self._closing.wait(FLUSH_S):
                    noted = self._drain(file, noted)
                self._drain(file, noted)
        except (OSError, ValueError) as error:
            self._failed = True
            self.dropped += len(self._buffer)
            self._buffer.clear()
            logger.warning(
                "ppbalance: no more step log, %s cannot be written: %s. Serving goes on.",
                self.path,
                error,
            )

    def _drain(self, file: Any, noted: int) -> int:
        """Write the buffer; the number of dropped records that the file tells of."""
        buffer = self._buffer
        for _ in range(len(buffer)):
            file.write(json.dumps(buffer[0], separators=(",", ":")) + "\n")
            buffer.popleft()
        if self.dropped > noted:
            noted = self.dropped
            file.write(json.dumps({"dropped": noted}) + "\n")
        file.flush()
        return noted
