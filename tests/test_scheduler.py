"""Our scheduler in front of vLLM's real ones, in virtual time."""

import random
from functools import cache
from itertools import pairwise

import pytest

pytest.importorskip("vllm")

import vllm

from bench.clock import VirtualClock
from bench.engine import Engine
from bench.engine_types import RequestSpec
from bench.pipeline import Pipeline
from bench.vllm_harness import VllmAdapter, build_scheduler
from tests.worlds import ASYNC, MODES, SYNC, batch_of, serve, settings, stage_s
from vllm_ppbalance import Scheduler
from vllm_ppbalance.chunk import FixedChunk
from vllm_ppbalance.reader import read_state

pytestmark = pytest.mark.scheduler

REBALANCE = ["off", "even_share", "threshold"]
CHUNKS = [{"chunk": "fixed"}, {"chunk": "fixed", "fixed_tokens": 64}, {"chunk": "greedy"}]
each_mode = pytest.mark.parametrize("mode", [SYNC, ASYNC], ids=["sync", "async-v2"])
no_sync_drafts = pytest.mark.skipif(
    vllm.__version__.startswith("0.23."),
    reason="stock vLLM 0.23 schedules negative token counts with drafts and synchronous PP",
)
every_mode = pytest.mark.parametrize("mode", MODES.values(), ids=MODES)


def mixed_load(seed, count=40, rate=60.0):
    """Random prompts, outputs and arrivals; some requests are aborted."""
    rng = random.Random(seed)
    now = 0.0
    requests = []
    for i in range(count):
        now += rng.expovariate(rate)
        abort_s = now + rng.uniform(0.01, 1.0) if rng.random() < 0.1 else None
        prompt, output = rng.randint(1, 400), rng.randint(1, 60)
        requests.append(RequestSpec(f"r{i}", now, prompt, output, abort_s=abort_s))
    return requests


def settled(ran, pp_size, skip=8):
    """Decodes per micro-batch once the prompts are done, whole rounds of the middle."""
    decodes = ran.decodes[skip * pp_size : (skip + 4) * pp_size]
    return decodes


@every_mode
def test_class_and_instance(mode):
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler

    ran = serve(batch_of(1), pp_size=2, **mode)
    assert isinstance(ran.scheduler, Scheduler)
    assert isinstance(ran.scheduler, AsyncScheduler) == mode["async_scheduling"]
    assert not ran.scheduler.ppbalance_failed


@every_mode
def test_sixteen_decodes_spread_over_four_micro_batches(mode):
    stock = serve(batch_of(16), stock=True, pp_size=4, **mode)
    ours = serve(
        batch_of(16), pp_size=4, additional_config=settings(rebalance="even_share"), **mode
    )
    assert sorted(settled(stock, 4)) == [0] * 12 + [16] * 4
    assert settled(ours, 4) == [4] * 16
    assert ours.tokens == stock.tokens


@each_mode
def test_sixteen_requests_at_two_stages_go_eight_and_eight(mode):
    ours = serve(
        batch_of(16), pp_size=2, additional_config=settings(rebalance="even_share"), **mode
    )
    assert settled(ours, 2) == [8] * 8


def uneven_arrivals():
    """Four groups whose prompts end in four different micro-batches: 12, 16, 11 and 9."""
    groups = zip((12, 16, 11, 9), "abcd", strict=True)
    return [
        spec
        for i, (count, name) in enumerate(groups)
        for spec in batch_of(count, prompt=8, max_tokens=60, arrival_s=i * 5.5e-3, prefix=name)
    ]


@each_mode
@pytest.mark.parametrize(("rebalance", "spread"), [("even_share", 0), ("threshold", 3)])
def test_uneven_cohorts_converge(mode, rebalance, spread):
    stock = serve(uneven_arrivals(), stock=True, pp_size=4, **mode)
    before = stock.decodes[24:28]
    ours = serve(
        uneven_arrivals(), pp_size=4, additional_config=settings(rebalance=rebalance), **mode
    )
    after = ours.decodes[40:44]
    assert max(before) - min(before) >= 5
    assert sum(after) == 48
    assert max(after) - min(after) <= spread
    assert ours.tokens == stock.tokens


@each_mode
def test_a_request_alone_is_never_held(mode):
    for rebalance in REBALANCE:
        stock = serve(batch_of(1), stock=True, pp_size=4, **mode)
        ours = serve(
            batch_of(1), pp_size=4, additional_config=settings(rebalance=rebalance), **mode
        )
        assert ours.rows == stock.rows
        assert ours.result.end_s == stock.result.end_s


@each_mode
def test_a_prefill_burst_beside_decodes_takes_no_more_steps_than_stock(mode):
    requests = batch_of(16, max_tokens=80) + batch_of(64, prompt=300, arrival_s=0.2, prefix="burst")

    def steps_to_last_prompt(**options):
        ran = serve(requests, pp_size=4, max_num_batched_tokens=1024, **options, **mode)
        prompts = [i for i, step in enumerate(ran.result.steps) if step.shape.prefills]
        arrived = next(i for i, rows in enumerate(ran.rows) if "burst0" in rows)
        return prompts[-1] - arrived, ran.tokens

    stock_steps, stock_tokens = steps_to_last_prompt(stock=True)
    for rebalance in REBALANCE:
        steps, tokens = steps_to_last_prompt(additional_config=settings(rebalance=rebalance))
        assert steps <= stock_steps
        assert tokens == stock_tokens


@cache
def stock_mixed_load(async_scheduling, pp_size):
    mode = ASYNC if async_scheduling else SYNC
    return serve(mixed_load(1), stock=True, pp_size=pp_size, max_num_batched_tokens=512, **mode)


@each_mode
@pytest.mark.parametrize("pp_size", [2, 4])
@pytest.mark.parametrize("rebalance", REBALANCE)
@pytest.mark.parametrize("chunk", CHUNKS, ids=str)
def test_tokens_are_those_of_stock_and_nothing_is_left_behind(mode, pp_size, rebalance, chunk):
    stock = stock_mixed_load(mode["async_scheduling"], pp_size)
    options = {"pp_size": pp_size, "max_num_batched_tokens": 512, **mode}
    ours = serve(mixed_load(1), additional_config=settings(rebalance=rebalance, **chunk), **options)
    assert not ours.scheduler.ppbalance_failed
    finished = {n for n, r in stock.result.requests.items() if r.finished and not r.aborted}
    for name in finished:
        record = ours.result.requests[name]
        assert record.finished
        if not record.aborted:
            assert ours.tokens[name] == stock.tokens[name]
    own = ours.scheduler.ppbalance
    assert not own.cohorts.holds_in_a_row
    assert not any(own.cohorts.parked.values())
    assert not own.timer.last_token_s.keys() - ours.scheduler.finished_req_ids
    assert not own.prefilling - ours.scheduler.finished_req_ids
    own.finished(ours.scheduler.finished_req_ids)
    assert own.backlog.waiting_tokens == 0
    assert own.backlog.arrived_tokens == sum(spec.prompt for spec in mixed_load(1))


@each_mode
def test_nobody_is_held_for_a_whole_round_and_never_everybody(mode):
    for rebalance in ("even_share", "threshold"):
        ran = serve(
            mixed_load(2, count=80),
            pp_size=4,
            additional_config=settings(rebalance=rebalance),
            **mode,
        )
        in_a_row: dict[str, int] = {}
        for held, rows in zip(ran.held, ran.rows, strict=True):
            in_a_row = {name: in_a_row.get(name, 0) + 1 for name in held}
            assert max(in_a_row.values(), default=0) <= 3
            assert rows or not held
            assert not held & rows.keys()


@each_mode
def test_abort_of_a_held_request(mode):
    requests = batch_of(16, max_tokens=60)
    first = serve(requests, pp_size=4, additional_config=settings(rebalance="even_share"), **mode)
    step = next(i for i, held in enumerate(first.held) if held)
    victim = min(first.held[step])
    at_s = first.result.steps[step].schedule_s + 1e-6
    requests = [
        RequestSpec(r.request_id, 0.0, 8, 60, abort_s=at_s if r.request_id == victim else None)
        for r in requests
    ]
    ours = serve(requests, pp_size=4, additional_config=settings(rebalance="even_share"), **mode)
    assert ours.held[step] == first.held[step]
    assert ours.result.requests[victim].aborted
    others = [r for name, r in ours.result.requests.items() if name != victim]
    assert all(r.finished and r.num_tokens == 60 for r in others)
    assert victim not in ours.scheduler.ppbalance.cohorts.holds_in_a_row


def short_kv_load(seed):
    rng = random.Random(seed)
    return [
        RequestSpec(f"r{i}", 0.001 * i, rng.randint(10, 40), rng.randint(30, 80), priority=i % 3)
        for i in range(24)
    ]


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_short_kv_preempts_no_more_than_stock(policy):
    """Summed over loads and modes: who meets whom when the blocks run out is chance."""
    preemptions = dict.fromkeys(["stock", *REBALANCE], 0)
    for mode in (SYNC, ASYNC):
        for seed in range(4):
            options = {"pp_size": 4, "num_gpu_blocks": 60, "policy": policy, **mode}
            stock = serve(short_kv_load(seed), stock=True, **options)
            preemptions["stock"] += stock.preemptions
            for rebalance in REBALANCE:
                config = settings(rebalance=rebalance)
                ours = serve(short_kv_load(seed), additional_config=config, **options)
                assert ours.tokens == stock.tokens
                assert not ours.scheduler.ppbalance_failed
                preemptions[rebalance] += ours.preemptions
    assert preemptions["stock"] > 50
    assert max(preemptions.values()) == preemptions["stock"]


@each_mode
def test_structured_output(mode):
    requests = [RequestSpec(f"r{i}", 0.0, 8, 20, structured=i % 2 == 0) for i in range(12)]
    options = {"pp_size": 2, "structured_outputs": True, **mode}
    stock = serve(requests, stock=True, **options)
    ours = serve(requests, additional_config=settings(rebalance="even_share"), **options)
    assert ours.tokens == stock.tokens
    assert any(ours.held)


@each_mode
def test_lora(mode):
    requests = [RequestSpec(f"r{i}", 0.0, 8, 30, lora_id=i % 3) for i in range(18)]
    options = {"pp_size": 2, "max_loras": 2, **mode}
    stock = serve(requests, stock=True, **options)
    ours = serve(requests, additional_config=settings(rebalance="even_share"), **options)
    assert ours.tokens == stock.tokens


@each_mode
def test_prefix_cache_hits(mode):
    shared = list(range(10, 330))
    requests = [RequestSpec(f"r{i}", 0.05 * i, [*shared, 400 + i], 30) for i in range(12)]
    options = {"pp_size": 4, "prefix_caching": True, "max_num_batched_tokens": 256, **mode}
    stock = serve(requests, stock=True, **options)
    for chunk in CHUNKS:
        config = settings(rebalance="even_share", **chunk)
        ours = serve(requests, additional_config=config, **options)
        assert ours.tokens == stock.tokens
        computed = sum(step.shape.prefill_tokens for step in ours.result.steps)
        assert computed < 2 * len(shared)


@no_sync_drafts
def test_ngram_speculation_sync():
    requests = batch_of(12, max_tokens=60)
    options = {"pp_size": 4, "num_draft_tokens": 3, **SYNC}
    stock = serve(requests, stock=True, **options)
    ours = serve(
        requests,
        additional_config=settings(rebalance="even_share", chunk="fixed", fixed_tokens=1),
        **options,
    )
    assert ours.tokens == stock.tokens
    assert any(ours.drafts)
    for rows, drafts, held in zip(ours.rows, ours.drafts, ours.held, strict=True):
        assert drafts.keys() <= rows.keys()
        assert not held & drafts.keys()
        assert all(token >= 0 for tokens in drafts.values() for token in tokens)


@each_mode
@pytest.mark.parametrize("strategy", ["fixed", "greedy"])
def test_a_budget_of_one_token_still_lets_everybody_finish(mode, strategy):
    knobs = {"fixed_tokens": 1} if strategy == "fixed" else {"greedy_min_chunk": 1}
    ours = serve(
        batch_of(8, prompt=30, max_tokens=20),
        pp_size=4,
        additional_config=settings(chunk=strategy, rebalance="even_share", **knobs),
        **mode,
    )
    assert all(r.finished and r.num_tokens == 20 for r in ours.result.requests.values())


def test_the_floor_respects_the_long_prefill_threshold():
    ours = serve(
        batch_of(4, prompt=300, max_tokens=5),
        pp_size=2,
        long_prefill_token_threshold=96,
        additional_config=settings(chunk="fixed", fixed_tokens=8),
        **SYNC,
    )
    assert max(sum(rows.values()) for rows in ours.rows) >= 96


class Shrinking:
    """Room for all at first, then for next to nothing."""

    reason = ""

    def budget(self, state):
        return 1024 if state.step < 12 else 128


def shrinking(**options):
    scheduler = Scheduler(**options)
    scheduler.ppbalance.chunk = Shrinking()
    return scheduler


@each_mode
def test_decodes_go_on_behind_several_prompts_of_the_threshold(mode):
    """Each half-computed prompt takes as much before the decodes behind it get anything."""
    longs = batch_of(4, prompt=6000, max_tokens=2)
    ran = serve(
        [*longs, RequestSpec("d", 0.001, 8, 60)],
        ours=shrinking,
        pp_size=4,
        long_prefill_token_threshold=128,
        **mode,
    )
    times_s = ran.result.requests["d"].token_times_s
    assert len(times_s) == 60
    assert max(after - before for before, after in pairwise(times_s)) < 0.1


@pytest.mark.parametrize(
    "mode",
    [pytest.param(SYNC, marks=no_sync_drafts), pytest.param(ASYNC)],
    ids=["sync", "async-v2"],
)
@pytest.mark.parametrize("drafts", [2, 5])
def test_a_prompt_with_one_token_left_is_admitted_beside_drafting_decodes(mode, drafts):
    """vLLM pads it by draft tokens, and admits nobody where it has no room for them."""
    shared = [7] * 160
    first = RequestSpec("first", 0.0, [*shared, 9], 2)
    decodes = [RequestSpec(f"d{i}", 0.5, [*shared, 10 + i], 300) for i in range(8)]
    late = RequestSpec("late", 1.0, [*shared, 99], 5)
    ran = serve(
        [first, *decodes, late],
        pp_size=2,
        num_draft_tokens=drafts,
        prefix_caching=True,
        additional_config=settings(chunk="fixed", fixed_tokens=1),
        **mode,
    )
    result = ran.result.requests["late"]
    assert result.first_token_s - result.arrival_s < 0.2


@pytest.mark.parametrize(("active", "seats"), [(3, 3), (1000, 128)])
def test_seats_are_those_that_vllm_admits(active, seats):
    """`--max-num-active-seqs` of 0.32 and later may be fewer than the runner's slots."""
    ran = serve(batch_of(1, max_tokens=2), pp_size=2, max_num_seqs=128, **ASYNC)
    ran.scheduler.max_num_active_reqs = active
    state = read_state(ran.scheduler, ran.scheduler.ppbalance, 100, 8192)
    assert state.max_num_seqs == seats


@every_mode
def test_those_who_resume_found_no_prefix(mode):
    """Model Runner V2 names them among the new ones; they find blocks of their own."""
    ran = serve(
        batch_of(40, prompt=200, max_tokens=300),
        pp_size=2,
        prefix_caching=True,
        num_gpu_blocks=300,
        **mode,
    )
    assert ran.preemptions
    assert ran.scheduler.ppbalance.backlog.cached_share < 0.02


@every_mode
def test_one_stage_is_stock(mode):
    stock = serve(mixed_load(3), stock=True, **mode)
    config = settings(chunk="greedy", rebalance="even_share")
    ours = serve(mixed_load(3), additional_config=config, **mode)
    assert type(ours.scheduler) is type(stock.scheduler)
    assert ours.rows == stock.rows


@each_mode
def test_fixed_without_rebalancing_makes_stocks_schedules(mode):
    stock = serve(mixed_load(4), stock=True, pp_size=4, **mode)
    ours = serve(mixed_load(4), pp_size=4, additional_config=settings(), **mode)
    assert ours.rows == stock.rows
    assert ours.result.end_s == stock.result.end_s


def test_schedule_passes_on_what_it_does_not_know():
    """0.32 and later call schedule(throttle_prefills) positionally; 0.23 takes no argument."""
    import inspect

    from vllm.v1.core.sched.scheduler import Scheduler as Stock

    ran = serve(batch_of(1, max_tokens=2), pp_size=2, **ASYNC)
    seen = []
    stock = type(ran.scheduler).__bases__[1]
    original = stock.schedule

    def schedule(self, *args, **kwargs):
        seen.append((args, kwargs))
        return original(self)

    stock.schedule = schedule
    try:
        ran.scheduler.schedule(True)
        ran.scheduler.schedule(throttle_prefills=True)
    finally:
        if "schedule" in stock.__dict__ and stock is not Stock:
            del stock.schedule
        else:
            stock.schedule = original
    assert seen == [((True,), {}), ((), {"throttle_prefills": True})]
    assert inspect.isfunction(Stock.schedule)


def test_the_state_says_what_the_scheduler_holds():
    """The reader fills the state by position: each value must land in its field."""
    requests = batch_of(12, prompt=300, max_tokens=40)
    seen, recent = [], []

    class Watch(FixedChunk):
        def budget(self, state):
            seen.append((state, list(state.waiting)))
            recent.extend(state.recent)
            return super().budget(state)

    scheduler = build_scheduler(
        Scheduler,
        pp_size=4,
        max_num_batched_tokens=512,
        num_gpu_blocks=4096,
        additional_config=settings(),
        **SYNC,
    )
    scheduler.ppbalance.chunk = Watch(512)
    clock = VirtualClock()
    Engine(scheduler, Pipeline([stage_s] * 4), VllmAdapter(), clock=clock).run(requests)
    first = seen[0][0]
    assert (first.step, first.now_s, first.pp_size) == (1, 0.0, 4)
    assert (first.max_budget, first.min_budget, first.decode_budget) == (512, 1, 0)
    assert (first.num_ready, first.num_waiting, first.num_prefilling) == (0, 12, 0)
    assert (first.waiting_tokens, first.arrived_tokens, first.kv_free) == (3600, 3600, 1.0)
    assert (list(first.in_flight), list(first.parked), first.planned_prefill) == ([], [], 0)
    for state, waiting in seen:
        assert state.waiting_tokens == sum(prompt.new_tokens for prompt in waiting)
        assert state.decode_budget == state.num_ready <= 12
        assert 0.9 < state.kv_free <= 1.0
    ends = [[new + before == 300 for new, before in batch.prefills] for batch in recent]
    assert [True, False] in ends
    assert all(flags == sorted(flags, reverse=True) for flags in ends)  # last chunks come first
    last = seen[-1][0]
    assert last.totals.first_tokens == 12
    assert last.totals.gaps > 400


HOOKS = ["_before", "_after", "_observe", "_forget_preempted", "read_state", "read_rows"]


@each_mode
@pytest.mark.parametrize("hook", HOOKS)
def test_a_failure_of_ours_is_logged_once_and_leaves_stock_scheduling(
    mode, hook, monkeypatch, caplog
):
    from vllm_ppbalance import scheduler

    owner = scheduler.PPBalanceMixin if hook.startswith("_") else scheduler
    requests = short_kv_load(0)
    options = {"pp_size": 4, "num_gpu_blocks": 60, **mode}
    stock = serve(requests, stock=True, **options)
    original, calls = getattr(owner, hook), []

    def fails_later(*args):
        calls.append(hook)
        if len(calls) > 5:
            raise RuntimeError("planted")
        return original(*args)

    monkeypatch.setattr(owner, hook, fails_later)
    monkeypatch.setattr("vllm_ppbalance.scheduler.logger.propagate", True)
    with caplog.at_level("ERROR"):
        ours = serve(requests, additional_config=settings(rebalance="even_share"), **options)
    assert ours.scheduler.ppbalance_failed
    assert len([r for r in caplog.records if "ppbalance failed" in r.message]) == 1
    assert ours.tokens == stock.tokens
    assert ours.scheduler.max_num_scheduled_tokens == 2048
