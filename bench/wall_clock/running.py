"""Starts a wall-clock server in a process of its own, waits for it, and always stops it."""

import re
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bench.live_server import LiveServer, tail
from bench.wall_clock.launch import Deployment

PROFILE_LIMIT_S = 90.0  # the plugin measures the stages for 30 s at most
_MEASURED = re.compile(r"ppbalance: measur(ed|ing ended)|stage times: the saved profile")


@dataclass
class WallClockServer(LiveServer):
    """A context manager around one `python -m bench.wall_clock.serve`."""

    words: Sequence[str] = ()

    def command(self) -> list[str]:
        """The command line, as a person would type it."""
        return [
            *(sys.executable, "-m", "bench.wall_clock.serve"),
            *("--port", str(self.port)),
            *self.words,
            *(("--", *self.arguments) if self.arguments else ()),
        ]


@dataclass(frozen=True)
class ServerOptions:
    """Options of `bench.wall_clock.serve` beside the deployment's."""

    log: Path
    arguments: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)


def server_of(deployment: Deployment, options: ServerOptions) -> WallClockServer:
    """A server not yet started."""
    return WallClockServer(
        deployment.make_model(),
        deployment.pp_size,
        options.log,
        options.arguments,
        options.environment,
        words=deployment.words(),
    )


def wait_for_profile(log: Path, limit_s: float = PROFILE_LIMIT_S) -> None:
    """Until the plugin of the server that writes `log` has its stage times.

    The first request would end the measuring. Raises RuntimeError after `limit_s`.
    """
    deadline_s = time.monotonic() + limit_s
    while not _MEASURED.search(log.read_text(errors="replace")):
        if time.monotonic() > deadline_s:
            raise RuntimeError(f"no stage times after {limit_s:.0f} s: {tail(log)}")
        time.sleep(0.5)
