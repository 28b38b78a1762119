"""The engine's loop around vLLM's own schedulers, in virtual time."""

import random
from dataclasses import asdict
from itertools import pairwise

import pytest

pytest.importorskip("vllm")

from bench.clock import VirtualClock
from bench.engine import Engine, EngineStuckError
from bench.engine_types import HostTime, RequestSpec
from bench.pipeline import Pipeline
from bench.vllm_harness import VllmAdapter, batch_shape, build_scheduler, sample_token

pytestmark = pytest.mark.scheduler

STAGE_S = 0.01
CASES = [(pp, False) for pp in (1, 2, 4)] + [(pp, True) for pp in (1, 2, 4)]
each_pipeline = pytest.mark.parametrize(
    ("pp_size", "is_async"), CASES, ids=[f"pp{p}-{'async' if a else 'sync'}" for p, a in CASES]
)


def make(pp_size, is_async, *, stage=lambda _: STAGE_S, host=None, on_schedule=None, **options):
    options.setdefault("num_gpu_blocks", 1024)
    scheduler = build_scheduler(
        pp_size=pp_size, async_scheduling=is_async, v2_model_runner=is_async, **options
    )
    return Engine(
        scheduler,
        Pipeline([stage] * pp_size),
        VllmAdapter(),
        host=host,
        clock=VirtualClock(),
        on_schedule=on_schedule,
        keep_tokens=True,
    )


def random_requests(seed, count=40, **fields):
    rng = random.Random(seed)
    now, requests = 0.0, []
    for i in range(count):
        now += rng.expovariate(100.0)
        tokens = rng.randint(1, 25)
        requests.append(RequestSpec(f"r{i}", now, rng.randint(1, 300), tokens, **fields))
    return requests


def assert_served(engine, requests):
    """Each request got exactly its tokens, in order; the scheduler holds nothing any more."""
    for spec in requests:
        served = engine.result.requests[spec.request_id]
        assert served.finished
        expected = [sample_token(spec.request_id, i) for i in range(spec.max_tokens)]
        assert served.token_ids == expected
    assert not engine.scheduler.requests
    assert engine.result.steps[-1].alive_decodes == 0


@each_pipeline
def test_every_request_gets_exactly_its_tokens(pp_size, is_async):
    requests = random_requests(seed=pp_size)
    engine = make(pp_size, is_async, max_num_seqs=32, max_num_batched_tokens=128)
    result = engine.run(requests)
    assert_served(engine, requests)
    prefill_tokens = sum(step.shape.prefill_tokens for step in result.steps)
    assert prefill_tokens == sum(spec.prompt for spec in requests)
    decodes = sum(step.shape.decodes for step in result.steps)
    assert decodes == sum(spec.max_tokens - 1 for spec in requests)
    assert max(step.shape.num_tokens for step in result.steps) == 128


@pytest.mark.parametrize("pp_size", [2, 4])
def test_an_async_decode_comes_back_every_pp_size_steps(pp_size):
    engine = make(pp_size, True)
    result = engine.run([RequestSpec("r", 0.0, 8, 6)])
    busy = [step.step for step in result.steps if step.shape.num_tokens]
    assert busy == [i * pp_size for i in range(6)]
    # Alone it is bound by the whole pipeline, not by one stage.
    times = result.requests["r"].token_times_s
    gaps = [later - earlier for earlier, later in pairwise(times)]
    assert gaps == pytest.approx([pp_size * STAGE_S] * 5, abs=1.1e-3)


@each_pipeline
def test_a_saturated_pipeline_finishes_one_batch_a_stage_time(pp_size, is_async):
    """pp_size groups, each a micro-batch's budget of prompts: every STAGE_S one gets its tokens."""
    requests = [RequestSpec(f"r{i}", 0.0, 16, 50) for i in range(4 * pp_size)]
    engine = make(pp_size, is_async, max_num_seqs=64, max_num_batched_tokens=64)
    result = engine.run(requests)
    first_s = min(record.first_token_s for record in result.requests.values())
    last_s = max(record.last_token_s for record in result.requests.values())
    assert first_s == pytest.approx(pp_size * STAGE_S)
    assert last_s == pytest.approx((pp_size + 50 * pp_size - 1) * STAGE_S)
    for intervals in engine.pipeline.intervals:
        span = intervals[-1].end_s - intervals[0].start_s
        assert sum(i.end_s - i.start_s for i in intervals) == pytest.approx(span)


@pytest.mark.parametrize(("is_async", "step_s"), [(False, STAGE_S + 0.003), (True, STAGE_S)])
def test_async_scheduling_hides_the_host(is_async, step_s):
    host = HostTime(schedule_s=0.002, update_s=0.001)
    result = make(1, is_async, host=host).run([RequestSpec("r", 0.0, 8, 21)])
    record = result.requests["r"]
    assert (record.last_token_s - record.first_token_s) / 20 == pytest.approx(step_s, abs=2e-4)


def first_stage_starts(engine):
    return [interval.start_s for interval in engine.pipeline.intervals[0]]


def test_async_prompts_flow_freely_but_decodes_wait_for_their_tokens():
    """Behind a slow last stage only a step whose tokens come from there has to wait."""
    slow_end = [lambda _: STAGE_S, lambda _: 3 * STAGE_S]
    prompts = make(2, True, max_num_seqs=16, max_num_batched_tokens=16)
    prompts.pipeline = Pipeline(slow_end)
    prompts.run([RequestSpec("r", 0.0, 48, 1)])
    assert first_stage_starts(prompts) == pytest.approx([0.0, STAGE_S, 2 * STAGE_S])
    decodes = make(2, True)
    decodes.pipeline = Pipeline(slow_end)
    decodes.run([RequestSpec("r", 0.0, 8, 3)])
    assert first_stage_starts(decodes) == pytest.approx([0.0, 4 * STAGE_S, 8 * STAGE_S], abs=1e-9)


@pytest.mark.parametrize(("pp_size", "is_async", "depth"), [(1, False, 1), (4, False, 4)])
def test_batches_in_flight_sync(pp_size, is_async, depth):
    assert deepest_queue(pp_size, is_async) == depth


@pytest.mark.parametrize(("pp_size", "depth"), [(1, 2), (4, 5)])
def test_batches_in_flight_async(pp_size, depth):
    assert deepest_queue(pp_size, True) == depth


def deepest_queue(pp_size, is_async):
    """Batches between schedule and completion at the worst moment of a long prefill."""
    engine = make(pp_size, is_async, max_num_seqs=16, max_num_batched_tokens=16)
    steps = engine.run([RequestSpec("r", 0.0, 16 * 40, 2)]).steps
    return max(
        sum(other.schedule_s <= step.schedule_s < other.done_s for other in steps) for step in steps
    )


@each_pipeline
def test_an_abort_frees_everything_and_stops_the_tokens(pp_size, is_async):
    requests = [
        RequestSpec(f"r{i}", 0.0, 30, 40, abort_s=0.205 if i % 2 else None) for i in range(8)
    ]
    engine = make(pp_size, is_async)
    result = engine.run(requests)
    assert_served(engine, requests[::2])
    for spec in requests[1::2]:
        record = result.requests[spec.request_id]
        assert record.aborted
        assert 0 < record.num_tokens < 40
        assert record.last_token_s <= 0.205
    usage = engine.scheduler.kv_cache_manager.usage
    assert usage == 0.0


def test_an_abort_before_admission_is_no_request_served():
    engine = make(1, False, max_num_seqs=1)
    result = engine.run([RequestSpec("a", 0.0, 8, 20), RequestSpec("b", 0.0, 8, 5, abort_s=0.05)])
    assert result.requests["b"].aborted
    assert result.requests["b"].first_token_s is None
    assert result.requests["a"].num_tokens == 20


@each_pipeline
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_preemption_loses_nothing(pp_size, is_async, policy):
    requests = [RequestSpec(f"r{i}", 0.01 * i, 30, 20, priority=-(i % 5)) for i in range(12)]
    engine = make(pp_size, is_async, num_gpu_blocks=20, policy=policy)
    result = engine.run(requests)
    assert sum(step.preemptions for step in result.steps) > 0
    assert_served(engine, requests)


@each_pipeline
def test_a_prefix_is_computed_once(pp_size, is_async):
    prefix = list(range(3, 103))
    requests = [RequestSpec(f"r{i}", 0.5 * i, prefix, 4) for i in range(3)]
    engine = make(pp_size, is_async, prefix_caching=True)
    result = engine.run(requests)
    assert_served(engine, requests)
    chunks = [chunk for step in result.steps for chunk in step.shape.prefills]
    assert chunks == [(100, 0), (4, 96), (4, 96)]


def test_prompts_given_by_length_share_no_prefix():
    requests = [RequestSpec(f"r{i}", 0.5 * i, 100, 4) for i in range(3)]
    result = make(1, False, prefix_caching=True).run(requests)
    chunks = [chunk for step in result.steps for chunk in step.shape.prefills]
    assert chunks == [(100, 0)] * 3


@pytest.mark.parametrize(("pp_size", "is_async"), [(1, False), (1, True), (2, True), (4, True)])
def test_draft_tokens_are_verified_and_never_change_the_text(pp_size, is_async):
    requests = random_requests(seed=5, count=10)
    engine = make(pp_size, is_async, num_draft_tokens=3)
    result = engine.run(requests)
    assert_served(engine, requests)
    drafted = sum(step.shape.decode_tokens - step.shape.decodes for step in result.steps)
    assert drafted > 0
    decodes = sum(step.shape.decodes for step in result.steps)
    assert decodes < sum(spec.max_tokens - 1 for spec in requests)


@each_pipeline
def test_structured_requests_obey_their_grammar(pp_size, is_async):
    pytest.importorskip("xgrammar")
    requests = [RequestSpec(f"r{i}", 0.0, 30, 8, structured=i % 2 == 0) for i in range(4)]
    engine = make(pp_size, is_async, structured_outputs=True)
    result = engine.run(requests)
    assert_served(engine, requests[1::2])
    tokenizer = engine.scheduler.structured_output_manager.tokenizer
    letters = set(tokenizer.convert_tokens_to_ids(["a", "b"]))
    for spec in requests[::2]:
        assert len(result.requests[spec.request_id].token_ids) == 8
        assert set(result.requests[spec.request_id].token_ids) <= letters


@each_pipeline
def test_no_more_adapters_in_a_step_than_max_loras(pp_size, is_async):
    requests = [RequestSpec(f"r{i}", 0.0, 20, 5, lora_id=1 + i % 4) for i in range(12)]
    adapters = {spec.request_id: spec.lora_id for spec in requests}
    together = []
    engine = make(
        pp_size,
        is_async,
        max_loras=2,
        on_schedule=lambda output: together.append(
            len({adapters[request_id] for request_id in output.num_scheduled_tokens})
        ),
    )
    engine.run(requests)
    assert_served(engine, requests)
    assert max(together) == 2


@each_pipeline
def test_same_seed_same_bytes(pp_size, is_async):
    def run():
        stages = [lambda shape: 0.001 + 1e-5 * shape.num_tokens] * pp_size
        engine = make(pp_size, is_async, max_num_seqs=32, max_num_batched_tokens=128)
        engine.pipeline = Pipeline(stages, noise=0.2, seed=7)
        result = asdict(engine.run(random_requests(seed=3)))
        del result["schedule_us"], result["update_us"]
        return repr(result).encode()

    assert run() == run()


def test_arrivals_wait_for_the_engine_to_poll():
    """A request that comes while the synchronous engine blocks is seen when the batch is done."""
    result = make(1, False).run([RequestSpec("a", 0.0, 8, 3), RequestSpec("b", 0.001, 8, 1)])
    assert [step.shape.prefill_tokens for step in result.steps[:2]] == [8, 8]
    assert result.steps[1].schedule_s == pytest.approx(STAGE_S)
    assert result.requests["b"].first_token_s == pytest.approx(2 * STAGE_S)


def test_an_idle_engine_sleeps_until_the_next_arrival():
    result = make(2, True).run([RequestSpec("a", 0.0, 8, 1), RequestSpec("b", 60.0, 8, 1)])
    assert result.requests["b"].first_token_s == pytest.approx(60 + 2 * STAGE_S, abs=2e-3)
    assert len(result.steps) < 20


def test_a_request_that_never_fits_is_an_error():
    engine = make(2, True, num_gpu_blocks=4)
    with pytest.raises(EngineStuckError, match="0 requests running and 1 waiting"):
        engine.run([RequestSpec("r", 0.0, 200, 4)])


def test_a_run_can_stop_early():
    result = make(1, False).run([RequestSpec("r", 0.0, 8, 1000)], until_s=0.5)
    assert 0.5 <= result.end_s <= 0.5 + 2 * STAGE_S
    assert not result.requests["r"].finished


def test_batch_shape_sees_what_schedule_had_before_it():
    scheduler = build_scheduler(max_num_seqs=8, max_num_batched_tokens=64, num_gpu_blocks=64)
    VllmAdapter().add_request(scheduler, RequestSpec("r", 0.0, 100, 5))
    first = batch_shape(scheduler, scheduler.schedule())
    second = batch_shape(scheduler, scheduler.schedule())
    assert first.prefills == ((64, 0),)
    assert second.prefills == ((36, 64),)


def test_the_clock_cannot_go_back():
    clock = VirtualClock(2.0)
    clock.set(3.0)
    assert clock.monotonic() == clock.time() == 3.0
    with pytest.raises(ValueError, match="cannot go back"):
        clock.set(2.5)
