"""Where tests find the data files that are not committed."""

import os
from pathlib import Path

import pytest

FOLDER = Path(
    os.environ.get("PPBALANCE_DATA", Path(__file__).resolve().parents[2] / "shared" / "data")
)


def data_file(*parts: str) -> Path:
    """A file under PPBALANCE_DATA (default: shared/data beside the checkout), or a skip."""
    path = FOLDER.joinpath(*parts)
    if not path.exists():
        pytest.skip(f"needs {'/'.join(parts)} under PPBALANCE_DATA")
    return path
