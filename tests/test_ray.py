"""What we assume of vLLM's Ray executors, against vLLM's own code; no Ray cluster is started."""

from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

from vllm.ray.ray_env import get_env_vars_to_copy

from bench.vllm_harness import build_scheduler
from tests.worlds import batch_of, serve, settings
from vllm_ppbalance import Scheduler, plugin
from vllm_ppbalance.reader import cadence
from vllm_ppbalance.sources import RAY_COPIED_PREFIXES

pytestmark = pytest.mark.scheduler

# vLLM 0.33 has only the first; before, VLLM_USE_RAY_V2_EXECUTOR_BACKEND=0 took the second.
EXECUTORS = {"ray_executor_v2": "RayExecutorV2", "ray_executor": "RayDistributedExecutor"}


def prepare(data_parallel_backend):
    config = SimpleNamespace(
        additional_config={},
        scheduler_config=SimpleNamespace(scheduler_cls=None),
        parallel_config=SimpleNamespace(
            data_parallel_backend=data_parallel_backend, pipeline_parallel_size=1
        ),
    )
    plugin._prepare(config)
    return config.scheduler_config.scheduler_cls


@pytest.fixture
def ours(monkeypatch):
    """The server's environment: the flag, one setting, and a copied prefix of the user's own."""
    monkeypatch.setenv("PPBALANCE", "1")
    monkeypatch.setenv("PPBALANCE_SLO_TTFT", "3")
    monkeypatch.setenv(RAY_COPIED_PREFIXES, "MINE_")
    monkeypatch.setenv("MINE_ONE", "1")
    return {"PPBALANCE", "PPBALANCE_SLO_TTFT"}


def test_vllm_itself_leaves_our_variables_out(ours):
    assert not ours & get_env_vars_to_copy()


def test_an_engine_core_that_is_a_ray_actor_gets_our_variables(ours):
    assert prepare("ray") == "vllm_ppbalance.Scheduler"
    assert prepare("ray") == "vllm_ppbalance.Scheduler"  # every vLLM process may do it again
    assert ours | {"MINE_ONE"} <= get_env_vars_to_copy()


def test_elsewhere_the_environment_is_left_alone(ours):
    assert prepare("mp") == "vllm_ppbalance.Scheduler"
    assert not ours & get_env_vars_to_copy()


@pytest.mark.parametrize("module", EXECUTORS)
def test_the_queue_is_as_deep_as_with_local_workers(module):
    """The depth hangs on the mode alone, and the mode on what the executor supports."""
    pytest.importorskip("ray")
    executors = pytest.importorskip(f"vllm.v1.executor.{module}")
    executor = getattr(executors, EXECUTORS[module])
    is_async = executor.supports_async_scheduling()
    assert is_async is (module == "ray_executor_v2")
    scheduler = build_scheduler(
        Scheduler,
        additional_config=settings(),
        pp_size=4,
        async_scheduling=is_async,
        v2_model_runner=True,
        num_gpu_blocks=64,
    )
    config = scheduler.vllm_config
    config.parallel_config.distributed_executor_backend = "ray"
    assert config.max_concurrent_batches == (5 if is_async else 4)
    assert cadence(config) == ("step" if is_async else "completion")


@pytest.mark.parametrize("is_async", [True, False])
def test_decodes_are_evened_out_at_that_depth(is_async):
    ran = serve(
        batch_of(5, max_tokens=60) + batch_of(7, max_tokens=60, arrival_s=0.006, prefix="s"),
        additional_config=settings(rebalance="even_share"),
        pp_size=4,
        async_scheduling=is_async,
        v2_model_runner=True,
    )
    # 12 decodes over four cohorts, once both groups have begun.
    assert set(ran.decodes[40:120]) == {3}
