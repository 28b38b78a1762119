"""Which processes a server has, and had."""

import os
import time
from pathlib import Path


def session_pids(session: int) -> dict[int, str]:
    """Processes of a session that are no zombies, by id, with their command lines."""
    found = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            if os.getsid(int(entry.name)) != session:
                continue
            words = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except (ProcessLookupError, FileNotFoundError):
            continue
        if words:  # a zombie has none
            found[int(entry.name)] = words
    return found


def wait_until_gone(session: int, limit_s: float) -> dict[int, str]:
    """The processes of a session that are still there after `limit_s`."""
    deadline_s = time.monotonic() + limit_s
    while (left := session_pids(session)) and time.monotonic() < deadline_s:
        time.sleep(0.2)
    return left
