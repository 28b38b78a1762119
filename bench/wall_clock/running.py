"""Starts a wall-clock server in a process of its own, waits for it, and always stops it."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bench.live_server import LiveServer
from bench.wall_clock.launch import Deployment


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
