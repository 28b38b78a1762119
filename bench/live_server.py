"""Starts a real `vllm serve` on the CPU, waits for it with a limit, and always stops it."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

ROOT = Path(__file__).parent.parent
START_LIMIT_S = 420.0  # about 90 s on two free cores, minutes on busy ones
STOP_LIMIT_S = 20.0


class ServerError(RuntimeError):
    """The server did not come up, or went away; carries the end of its log."""


def free_port() -> int:
    """A TCP port nobody listens on at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def thread_binding(workers: int, cores: Sequence[int] | None = None) -> str:
    """One group of cores a worker, for VLLM_CPU_OMP_THREADS_BIND; cores are shared if few."""
    cores = sorted(os.sched_getaffinity(0)) if cores is None else cores
    if len(cores) < workers:
        return "|".join(str(cores[worker * len(cores) // workers]) for worker in range(workers))
    size = len(cores) // workers
    groups = (cores[worker * size : (worker + 1) * size] for worker in range(workers))
    return "|".join(",".join(map(str, group)) for group in groups)


def cpu_environment(pp_size: int) -> dict[str, str]:
    """What vLLM needs to run pp_size stages on this machine's CPU, without a network."""
    # A setting of the caller's shell must not leak into a server that is to be stock.
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("PPBALANCE")}
    path = [str(ROOT), *filter(None, [inherited.get("PYTHONPATH")])]
    return inherited | {
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": os.pathsep.join(path),
        "PYTHONUNBUFFERED": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": thread_binding(pp_size),
        # At the default of 5 s a client may pick a connection that the server is just closing.
        "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "600",
        "VLLM_LOGGING_LEVEL": "INFO",
        "VLLM_NO_USAGE_STATS": "1",
    }


def tail(log: Path, lines: int = 30) -> str:
    """The end of a log file, or a word when there is none."""
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:]) or "(empty log)"


def stop_group(process: "subprocess.Popen[bytes]", limit_s: float = STOP_LIMIT_S) -> None:
    """Ends a process that leads its own session, and every process it started."""
    if process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(limit_s)
    # Workers share the process group and may outlive their parent.
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(STOP_LIMIT_S)


@dataclass
class LiveServer:
    """A context manager around one `vllm serve`; `url` answers once it is entered."""

    model: Path
    pp_size: int
    log: Path
    arguments: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    start_limit_s: float = START_LIMIT_S
    port: int = field(default_factory=free_port)
    process: "subprocess.Popen[bytes] | None" = field(default=None, init=False)

    @property
    def url(self) -> str:
        """The server's address."""
        return f"http://127.0.0.1:{self.port}"

    def command(self) -> list[str]:
        """The command line, as a person would type it with `vllm` for `python -m ...`."""
        return [
            *(sys.executable, "-m", "bench.vllm_cli", "serve", str(self.model)),
            *("--host", "127.0.0.1", "--port", str(self.port)),
            *("--pipeline-parallel-size", str(self.pp_size)),
            *("--dtype", "float32", "--max-model-len", "4096"),
            # Without a compilation mode vLLM 0.32 never makes the tensors between the stages.
            *("--compilation-config", '{"mode":1,"backend":"eager"}'),
            *self.arguments,
        ]

    def spawn(self) -> "subprocess.Popen[bytes]":
        """Starts the process without waiting for it to answer."""
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("wb") as output:
            self.process = subprocess.Popen(
                self.command(),
                cwd=ROOT,
                env=cpu_environment(self.pp_size) | dict(self.environment),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return self.process

    def __enter__(self) -> Self:
        self.spawn()
        try:
            self.wait()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def wait(self) -> None:
        """Until it answers. Raises ServerError where it ends before, or is too late."""
        assert self.process is not None
        deadline = time.monotonic() + self.start_limit_s
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                code = self.process.returncode
                raise ServerError(f"server ended with code {code}; {self.log}:\n{tail(self.log)}")
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=5):
                    return
            except (urllib.error.URLError, OSError):
                time.sleep(0.5)
        raise ServerError(
            f"server not up after {self.start_limit_s:.0f} s; {self.log}:\n{tail(self.log)}"
        )

    def stop(self) -> None:
        """Ends the server and every process it started."""
        if self.process is not None:
            stop_group(self.process)
            self.process = None
