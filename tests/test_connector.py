"""A KV connector beside our scheduler: vLLM's real schedulers in virtual time."""

import pytest

pytest.importorskip("vllm")

from vllm.v1.outputs import KVConnectorOutput

from bench.clock import VirtualClock
from bench.engine import Engine
from bench.engine_types import RequestSpec
from bench.pipeline import Pipeline
from bench.vllm_harness import VllmAdapter, build_scheduler
from tests.test_predictive_policies import LONG, cost_model
from tests.worlds import ASYNC, SYNC, stage_s
from vllm_ppbalance import Scheduler
from vllm_ppbalance.profile_store import ProfileStore

pytestmark = pytest.mark.scheduler
each_mode = pytest.mark.parametrize("mode", [SYNC, ASYNC], ids=["sync", "async-v2"])


class Connector:
    """Has the whole prompt of requests named l..., and reads the blocks of those named k..."""

    supports_divergent_local_hybrid_hits = False
    requires_kv_delivery = False

    def __getattr__(self, name):
        return lambda *args, **kwargs: None

    def get_num_new_matched_tokens(self, request, computed):
        loads = request.request_id.startswith("l")
        return (request.num_tokens - computed, True) if loads else (0, False)

    def get_loaded_kv_cache_group_ids(self, request):
        return ()

    def request_finished(self, request, blocks):
        return request.request_id.startswith("k"), None


class Transfers(VllmAdapter):
    """Loads and sends are done once `until_s` has come."""

    def __init__(self, clock, until_s):
        super().__init__()
        self.clock, self.until_s = clock, until_s

    def model_output(self, scheduler, *args):
        output = super().model_output(scheduler, *args)
        if self.clock.monotonic() >= self.until_s:
            requests = scheduler.requests.values()
            loading = {r.request_id for r in requests if r.status.name == "WAITING_FOR_REMOTE_KVS"}
            kept = {r.request_id for r in requests if r.is_finished()}
            output.kv_connector_output = KVConnectorOutput(
                finished_recving=loading - scheduler.finished_recving_kv_req_ids,
                finished_sending=kept,
            )
        return output


def serve(requests, folder, mode, until_s):
    own = {"chunk": {"strategy": "balanced"}}
    own["profiling"] = {"mode": "off", "directory": str(folder)}
    scheduler = build_scheduler(
        Scheduler, pp_size=4, num_gpu_blocks=4096, additional_config={"ppbalance": own}, **mode
    )
    scheduler.connector = Connector()
    scheduler.ppbalance.use_model(cost_model(**LONG), ProfileStore(folder, {"model": "m"}))
    scheduler.ppbalance.saver = None
    clock = VirtualClock()
    engine = Engine(
        scheduler,
        Pipeline([stage_s] * 4),
        Transfers(clock, until_s),
        clock=clock,
        max_empty_steps=1 << 20,
    )
    result = engine.run(requests)
    assert not scheduler.ppbalance_failed
    assert all(record.finished for record in result.requests.values())
    return scheduler, result


@each_mode
def test_a_prompt_that_is_loaded_whole_may_be_left_alone(mode, tmp_path):
    """While it is loaded the last decode ends: now it is the only request, with no token to do."""
    requests = [RequestSpec("d", 0.0, 30, 20), RequestSpec("l", 0.2, 200, 5)]
    _, result = serve(requests, tmp_path, mode, until_s=2.0)
    assert result.requests["d"].last_token_s < 1.5
    assert result.requests["l"].num_tokens == 5
    assert result.requests["l"].first_token_s > 2.0


@each_mode
def test_an_aborted_request_whose_blocks_are_kept_is_forgotten(mode, tmp_path):
    """Its prompt's micro-batch comes back when it has been aborted for a step and more."""
    beside = [RequestSpec(f"d{i}", 0.01 * i, 30, 60) for i in range(8)]
    requests = [*beside, RequestSpec("k", 0.3, 100, 20, abort_s=0.315)]
    scheduler, result = serve(requests, tmp_path, mode, until_s=0.6)
    assert result.requests["k"].aborted
    own = scheduler.ppbalance
    own.finished(scheduler.finished_req_ids)
    assert not own.timer.last_token_s
    assert not own.timer.first_token_s
