"""Streaming-input sessions beside other requests: vLLM's real schedulers in virtual time."""

import pytest

pytest.importorskip("vllm")

from vllm.sampling_params import SamplingParams
from vllm.v1.request import Request

from bench.clock import VirtualClock
from bench.engine import Engine
from bench.engine_types import RequestSpec
from bench.pipeline import Pipeline
from bench.vllm_harness import VllmAdapter, build_scheduler
from tests.test_predictive_policies import cost_model
from tests.worlds import ASYNC, SYNC, stage_s
from vllm_ppbalance import Scheduler
from vllm_ppbalance.profile_store import ProfileStore

pytestmark = pytest.mark.scheduler
each_mode = pytest.mark.parametrize("mode", [SYNC, ASYNC], ids=["sync", "async-v2"])


class Sessions(VllmAdapter):
    """Requests whose names begin with s are sessions: after a turn they wait for the next one."""

    def add_request(self, scheduler, spec):
        if not spec.request_id.startswith("s"):
            super().add_request(scheduler, spec)
            return
        params = SamplingParams(max_tokens=spec.max_tokens, ignore_eos=True)
        request = Request(
            request_id=spec.request_id,
            prompt_token_ids=[7] * spec.prompt,
            sampling_params=params,
            pooling_params=None,
            arrival_time=spec.arrival_s,
            resumable=True,
        )
        scheduler.add_request(request)


def chunks_of_a_prompt_alone(requests, folder, mode):
    own = {"chunk": {"strategy": "balanced"}, "profiling": {"mode": "off"}}
    own["profiling"]["directory"] = str(folder)
    scheduler = build_scheduler(
        Scheduler, pp_size=4, num_gpu_blocks=4096, additional_config={"ppbalance": own}, **mode
    )
    scheduler.ppbalance.use_model(cost_model(5e-3, 1e-5), ProfileStore(folder, {"model": "m"}))
    scheduler.ppbalance.saver = None
    chunks = []

    def watch(output):
        if "p" in output.num_scheduled_tokens:
            chunks.append(output.num_scheduled_tokens["p"])

    pipeline = Pipeline([stage_s] * 4)
    Engine(scheduler, pipeline, Sessions(), clock=VirtualClock(), on_schedule=watch).run(requests)
    assert not scheduler.ppbalance_failed
    return chunks


@each_mode
def test_a_session_between_two_turns_is_not_taken_for_the_prompt_that_is_alone(mode, tmp_path):
    others = [
        RequestSpec("f", 5.0, 10, 80),  # so many steps that the session counts as gone
        RequestSpec("p", 20.0, 6000, 2),
    ]
    alone = chunks_of_a_prompt_alone(others, tmp_path, mode)
    beside = chunks_of_a_prompt_alone([RequestSpec("s", 0.0, 50, 3), *others], tmp_path, mode)
    assert sum(alone) == 6001
    assert beside == alone
