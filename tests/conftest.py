"""Settings shared by all tests."""

import logging
import os
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Machines that run the suite differ in speed by a lot; correctness must not depend on it.
settings.register_profile(
    "suite", deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True
)
settings.load_profile("suite")


@pytest.fixture(autouse=True)
def log_levels_as_before() -> Iterator[None]:
    """`python -m bench` quiets vLLM's log for its own process; later tests read that log."""
    logger = logging.getLogger("vllm")
    level = logger.level
    yield
    logger.setLevel(level)
