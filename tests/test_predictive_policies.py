"""ALP, equal latency, throttling and spread on plain values, with a cost model that is known."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.test_policies import pipeline
from vllm_ppbalance.base_table import BaseTable
from vllm_ppbalance.chunk import make_chunk_policy
from vllm_ppbalance.chunk.equal_latency import ChunkTimes, fit_chunk_times
from vllm_ppbalance.config import ChunkSettings, Settings
from vllm_ppbalance.cost_model import CostModel
from vllm_ppbalance.features import UNITS, reference_units
from vllm_ppbalance.state import MicroBatch, Waiting

STRATEGIES = ("alp", "equal_latency", "throttle", "spread")
TABLE = ((64, 128, 256, 512, 1024, 2048, 4096, 8192), 0.008, 4e-5)


def cost_model(fixed=0.008, token=4e-5, **terms):
    """A trusted model of `fixed` + `token` * tokens seconds, and of `terms` as in UNITS."""
    sizes = TABLE[0]
    table = BaseTable(sizes, [fixed + token * n for n in sizes])
    units = reference_units(table)
    theta = [1.0, *(terms.get(name, 0.0) / units[name] for name in UNITS if name != "base")]
    model = CostModel(table, theta, profiled=True)
    model.note_prefixes(range(0, 100_000, 1000))
    return model


def policy(strategy, model=None, slo=None, **chunk):
    settings = {"chunk": {"strategy": strategy, **chunk}, **(slo or {})}
    return make_chunk_policy(Settings.model_validate(settings), model)


def prompts(*tokens, waited_s=0.0, prefix=0):
    waiting = tuple(Waiting(f"w{i}", n, prefix, waited_s) for i, n in enumerate(tokens))
    return {"num_waiting": len(waiting), "waiting": waiting, "waiting_tokens": sum(tokens)}


@pytest.mark.parametrize("strategy", ["alp", "spread"])
def test_without_a_trusted_model_the_budget_is_the_safe_one(strategy):
    flat = cost_model(0.02, 0.0)
    assert not flat.trusted
    for model in (None, flat):
        chooser = policy(strategy, model, fallback_tokens=640)
        budgets = {chooser.budget(pipeline([3] * 4, 100 + i, **prompts(9000))) for i in range(20)}
        assert budgets == {640}


def test_equal_latency_without_a_trusted_model_gives_its_first_chunk_and_says_why():
    for model, reason in ((None, "no cost model"), (cost_model(0.02, 0.0), "no longer")):
        chooser = policy("equal_latency", model, equal_first_chunk=2048)
        alone = prompts(60_000, prefix=60_000)
        assert chooser.budget(pipeline([0] * 4, **alone)) == 2048
        assert reason in chooser.reason


def test_a_model_that_comes_to_be_trusted_is_used_and_left_when_it_is_not():
    model = cost_model()
    chooser = policy("alp", model, alp_chunk_max=4096)
    urgent = prompts(9000, waited_s=1.9)
    first = chooser.budget(pipeline([0] * 4, 100, **urgent))
    model.trust.mean_error = 0.9
    assert chooser.budget(pipeline([0] * 4, 101, **urgent)) == 512
    model.trust.mean_error = 0.0
    assert chooser.budget(pipeline([0] * 4, 102, **urgent)) == first != 512


# ALP: stage seconds are 8 ms + 40 us a token; 1024 tokens take 48.96 ms, 20,915 tokens a second.


def test_alp_takes_the_smallest_chunk_that_meets_the_inflow():
    chooser = policy("alp", cost_model())
    state = {"now_s": 100.0, **prompts(100)}
    chooser.budget(pipeline([0] * 4, 100, arrived_tokens=0, **state))
    # 128 -> 9,756 tokens/s, 256 -> 14,035, 384 -> 16,438.
    for inflow, chunk in ((9_000, 128), (9_800, 256), (14_000, 256), (14_100, 384)):
        chooser = policy("alp", cost_model())
        chooser.budget(pipeline([0] * 4, 100, arrived_tokens=0, **state))
        later = {**state, "now_s": 109.0}
        assert chooser.budget(pipeline([0] * 4, 108, arrived_tokens=10 * inflow, **later)) == chunk


def test_alp_forgets_arrivals_older_than_its_window():
    chooser = policy("alp", cost_model())
    for step, now_s in ((100, 0.0), (108, 20.0), (116, 40.0)):
        state = pipeline([0] * 4, step, now_s=now_s, arrived_tokens=10**6, **prompts(100))
        budget = chooser.budget(state)
    assert budget == 128


def test_alp_gives_stale_prompts_what_their_deadline_needs():
    # 10,000 tokens, 1.0 s left: 256; 0.6 s left: more than 16,438/s; fresh prompts: no hurry.
    for waited_s, chunk in ((1.0, 256), (1.4, 512), (0.49, 128)):
        budget = policy("alp", cost_model()).budget(
            pipeline([0] * 4, **prompts(10_000, waited_s=waited_s))
        )
        assert budget == chunk


def test_alp_asks_for_all_it_can_when_the_deadline_is_gone():
    # The largest chunk with (8 ms + 40 us * chunk) * 4 <= 1.05 * 0.2 s is 1024 of the multiples.
    assert policy("alp", cost_model()).budget(
        pipeline([0] * 4, **prompts(100, waited_s=1.9))
    ) == pytest.approx(1024)
    assert (
        policy("alp", cost_model(), alp_slo_tpot_coeff=10.0).budget(
            pipeline([0] * 4, **prompts(100, waited_s=1.9))
        )
        == 2048
    )


def test_alp_takes_its_minimum_when_nothing_keeps_tpot():
    slow = cost_model(fixed=0.1)
    assert policy("alp", slow).budget(pipeline([0] * 4, **prompts(9000, waited_s=1.9))) == 128


def test_alp_counts_decodes_and_prefixes_against_throughput():
    model = cost_model(prefix=1e-8, context=1e-7)
    idle = policy("alp", model).budget(pipeline([0] * 4, **prompts(9_000, waited_s=1.0)))
    busy = policy("alp", model).budget(pipeline([100] * 4, **prompts(9_000, waited_s=1.0)))
    long = policy("alp", model).budget(
        pipeline([0] * 4, **prompts(9_000, waited_s=1.0, prefix=4000))
    )
    assert idle < busy
    assert idle < long


def test_alp_packs_the_queue_in_order_and_only_what_is_there():
    """A queue that ends leaves the later micro-batches without attention, not without tokens."""
    seen = []

    class Spy(CostModel):
        def predict(self, num_tokens, prefills, decodes, decode_context):
            seen.append((num_tokens, tuple(prefills), decodes))
            return 0.01

    table = BaseTable((64, 512, 4096), (0.01, 0.02, 0.1))
    chooser = policy("alp", Spy(table, profiled=True), chunk_candidates=[200])
    chooser.budget(pipeline([50, 50], **prompts(120, 100, prefix=7)))
    assert seen == [(200, ((120, 7), (30, 7)), 50), (200, ((70, 37),), 50)]


def test_alp_decides_every_two_rounds_and_keeps_its_chunk_with_nothing_to_prefill():
    chooser = policy("alp", cost_model())
    hurry, easy = prompts(9_000, waited_s=1.9), prompts(100)
    budgets = [chooser.budget(pipeline([0] * 4, 100 + i, **(easy if i else hurry))) for i in (0, 7)]
    assert budgets == [1024, 1024]
    assert chooser.budget(pipeline([0] * 4, 108)) == 1024
    assert chooser.budget(pipeline([0] * 4, 116, **easy)) == 128


def test_alp_does_not_read_the_queue_between_decisions():
    class Unread:
        def __len__(self):
            raise AssertionError("the queue was read")

    chooser = policy("alp", cost_model())
    chooser.budget(pipeline([0] * 4, 100))
    for step in range(101, 108):
        chooser.budget(pipeline([0] * 4, step, num_waiting=5, waiting=Unread()))


def test_alp_runs_small_while_kv_is_short_and_goes_back():
    chooser, urgent = policy("alp", cost_model()), prompts(100, waited_s=1.9)
    assert chooser.budget(pipeline([70, 80, 90, 100], 100, **urgent)) == 1024
    assert chooser.budget(pipeline([70, 80, 90, 100], 108, kv_free=0.05, **urgent)) == 256
    assert chooser.budget(pipeline([70, 80, 90, 100], 116, kv_free=0.5)) == 1024


def test_alp_chunk_exceeds_the_requests_of_the_fullest_micro_batch():
    assert policy("alp", cost_model()).budget(pipeline([10, 10, 128, 10], **prompts(10))) == 256


def test_alp_candidates_are_a_range_or_a_list():
    assert ChunkSettings().candidates() == tuple(range(128, 2049, 128))
    assert ChunkSettings(chunk_candidates=[100, 700]).candidates() == (100, 700)
    with pytest.raises(ValueError, match="chunk_candidates"):
        ChunkSettings(chunk_candidates=[700, 100])
    with pytest.raises(ValueError, match="alp_chunk_min"):
        ChunkSettings(alp_chunk_min=4096)


# Equal latency: t(L, x) = 8 ms + 40 us x + 5 ns (2 L x + x^2).

LONG = {"square": 5e-9, "prefix": 1e-8}


def chunks_of(chooser, tokens, step=100, pp_size=4):
    """Chunks of a prompt that is alone, cut to what is left as vLLM does."""
    done, chunks = 0, []
    while done < tokens:
        half = Waiting("w", tokens - done, done, 0.0, running=True)
        state = pipeline(
            [0] * pp_size, step + len(chunks), num_prefilling=1, waiting=(half,), max_budget=16_384
        )
        chunks.append(min(chooser.budget(state), tokens - done))
        done += chunks[-1]
    return chunks


def test_chunks_take_equal_time_when_nothing_is_smoothed():
    model = cost_model(**LONG)
    chooser = policy("equal_latency", model, equal_first_chunk=8192, equal_smooth_factor=1.0)
    chunks = chunks_of(chooser, 80_000)
    assert chunks[0] == 8192
    assert chunks == sorted(chunks, reverse=True) or chunks[:-1] == sorted(
        chunks[:-1], reverse=True
    )
    done, times = 0, []
    for chunk in chunks[:-1]:
        times.append(model.predict(chunk, ((chunk, done),), 0, 0))
        done += chunk
    floor = 8192 // 4
    free = [t for t, chunk in zip(times, chunks, strict=False) if chunk > floor]
    assert len(free) > 5
    assert max(free) <= 1.03 * min(free)


def test_smoothing_makes_part_of_the_change():
    full = chunks_of(
        policy(
            "equal_latency", cost_model(**LONG), equal_first_chunk=8192, equal_smooth_factor=1.0
        ),
        30_000,
    )
    part = chunks_of(policy("equal_latency", cost_model(**LONG), equal_first_chunk=8192), 30_000)
    none = chunks_of(
        policy(
            "equal_latency", cost_model(**LONG), equal_first_chunk=8192, equal_smooth_factor=0.0
        ),
        30_000,
    )
    assert part[1] == pytest.approx(8192 + 0.75 * (full[1] - 8192), abs=64)
    assert full[1] < part[1] < none[1] == 8192


def test_chunks_are_aligned_and_at_least_a_quarter_of_the_first():
    chooser = policy("equal_latency", cost_model(**LONG), equal_first_chunk=8192,
                     equal_smooth_factor=1.0)  # fmt: skip
    chunks = chunks_of(chooser, 200_000)
    assert all(chunk % 64 == 0 for chunk in chunks[:-2])
    assert min(chunks[:-2]) == 2048


def test_a_short_rest_joins_the_chunk_before():
    chooser = policy("equal_latency", cost_model(**LONG), equal_first_chunk=4096)
    assert chunks_of(chooser, 4096 + 192) == [4288]


def test_a_short_rest_that_does_not_fit_makes_two_chunks_alike():
    chooser = policy("equal_latency", cost_model(**LONG), equal_first_chunk=4096)
    half = Waiting("w", 4096 + 192, 0, 0.0, running=True)
    state = pipeline([0] * 4, num_prefilling=1, waiting=(half,), max_budget=4096)
    assert chooser.budget(state) == 2176


def test_in_company_and_beside_nothing_every_chunk_is_the_first():
    chooser = policy("equal_latency", cost_model(**LONG), equal_first_chunk=4096)
    alone = pipeline([0] * 4, **prompts(50_000, prefix=50_000))
    company = pipeline([0] * 4, **prompts(50_000, 10, prefix=50_000))
    assert chooser.budget(alone) < 4096
    assert chooser.budget(company) == 4096
    assert chooser.budget(pipeline([0] * 4)) == 4096


def test_decodes_beside_the_chunk_come_on_top():
    chooser = policy("equal_latency", cost_model(**LONG), equal_first_chunk=4096)
    bare = chooser.budget(pipeline([0] * 4, **prompts(50_000, prefix=50_000)))
    assert chooser.budget(pipeline([30] * 4, **prompts(50_000, prefix=50_000))) == bare + 30


def test_reading_the_prefix_stays_a_small_part_of_a_chunk():
    """Where each chunk pays for its whole prefix, small chunks would do little else."""
    times = ChunkTimes(fixed=0.0, past=1e-6, token=4e-5, pair=5e-9)
    least = times.least_chunk(50_000, 0.2)
    total = 1e-6 * 50_000 + 4e-5 * least + 5e-9 * (2 * 50_000 * least + least**2)
    assert total == pytest.approx(1e-6 * 50_000 / 0.2)
    assert times.least_chunk(0, 0.2) == 0.0


def test_an_equal_chunk_solves_the_equation():
    times = ChunkTimes(fixed=0.01, past=1e-7, token=4e-5, pair=5e-9)

    def seconds(prefix, x):
        return 0.01 + 1e-7 * prefix + 4e-5 * x + 5e-9 * (2 * prefix * x + x * x)

    for prefix in (0, 4096, 100_000):
        chunk = times.equal_chunk(4096, prefix)
        assert seconds(prefix, chunk) == pytest.approx(seconds(0, 4096))
    assert times.equal_chunk(4096, 10**8) == 0.0


def test_the_fit_finds_the_terms_and_refuses_what_does_not_shrink():
    fit = fit_chunk_times(cost_model(past=1e-8, **LONG), 4096)
    assert fit.pair == pytest.approx(5e-9, rel=0.02)
    assert fit.token == pytest.approx(4e-5, rel=0.05)
    assert fit.past == pytest.approx(1e-8, rel=0.5)
    assert isinstance(fit_chunk_times(cost_model(), 4096), str)
    assert "less than" in fit_chunk_times(cost_model(square=5e-14, prefix=1e-13), 4096)


def test_few_prefix_lengths_seen_leave_the_first_chunk():
    model = cost_model(**LONG)
    fresh = CostModel.from_dict({**model.to_dict(), "prefix_lengths": [0, 1, 2]})
    chooser = policy("equal_latency", fresh, equal_first_chunk=4096)
    assert chooser.budget(pipeline([0] * 4, **prompts(50_000, prefix=50_000))) == 4096
    assert "3 of 8" in chooser.reason


# Throttling.


def test_throttle_is_a_share_of_what_waits_within_its_bounds():
    chooser = policy("throttle", throttle_kv_reserve=0.0)
    for waiting, prefill in ((0, 32), (8_000, 1_000), (80_000, 8_192)):
        assert chooser.budget(pipeline([0] * 4, **prompts(waiting))) == prefill


def test_throttle_gives_prefill_what_kv_is_left_above_the_reserve():
    chooser = policy("throttle", throttle_kv_reserve=0.2)
    for kv_free, prefill in ((1.0, 8192), (0.6, 4096), (0.2, 0), (0.1, 0)):
        state = pipeline([10] * 4, kv_free=kv_free, **prompts(10**6))
        assert chooser.budget(state) == prefill + 10


def test_throttle_rotates_the_remainder_of_the_decodes():
    chooser = policy("throttle")
    budgets = [chooser.budget(pipeline([6, 4, 4, 4], 100 + i)) - 32 for i in range(4)]
    assert sum(budgets) == 18
    assert set(budgets) == {4, 5}


# Spread.


def test_spread_divides_what_waits_over_its_rounds():
    chooser = policy("spread", cost_model())
    assert chooser.budget(pipeline([0] * 4, **prompts(4_000))) == 250
    assert chooser.budget(pipeline([20] * 4, **prompts(4_000))) == 270
    assert chooser.budget(pipeline([0] * 4, **prompts(100))) == 128


def test_spread_is_capped_where_throughput_is_nearly_the_best():
    # Of 25,000 tokens/s without end, best under 0.8 * 0.2 s / 4: 768 -> 19,834; 94 %: 640.
    chooser = policy("spread", cost_model())
    assert chooser.budget(pipeline([0] * 4, **prompts(10**6))) == 640
    whole = policy("spread", cost_model(), spread_throughput_ratio=1.0)
    assert whole.budget(pipeline([0] * 4, **prompts(10**6))) == 768
    tight = policy("spread", cost_model(), spread_throughput_ratio=1.0, spread_tpot_ratio=0.4)
    assert tight.budget(pipeline([0] * 4, **prompts(10**6))) == 256


# All of them, whatever the pipeline looks like.

states = st.fixed_dictionaries(
    {
        "cohorts": st.lists(st.integers(0, 300), min_size=2, max_size=8),
        "step": st.integers(1, 10**6),
        "now_s": st.floats(0.0, 1e6),
        "kv_free": st.floats(0.0, 1.0),
        "arrived_tokens": st.integers(0, 10**9),
        "queue": st.lists(
            st.tuples(st.integers(1, 200_000), st.integers(0, 131_072), st.floats(0.0, 100.0)),
            max_size=6,
        ),
    }
)
models = st.sampled_from(
    [
        None,
        cost_model(),
        cost_model(**LONG),
        cost_model(0.02, 0.0),
        cost_model(fixed=1e-6, token=1e-9, context=1e-3, decodes=1.0, past=1e-3),
    ]
)


def build(values):
    waiting = tuple(
        Waiting(f"w{i}", new, prefix, waited)
        for i, (new, prefix, waited) in enumerate(values["queue"])
    )
    fields = {k: v for k, v in values.items() if k not in ("cohorts", "queue", "step")}
    fields |= {"num_waiting": len(waiting), "waiting": waiting}
    return pipeline(values["cohorts"], values["step"], **fields)


@pytest.mark.parametrize("strategy", STRATEGIES)
@given(model=models, worlds=st.lists(states, min_size=1, max_size=6))
def test_a_budget_is_always_a_whole_number_of_at_least_one(strategy, model, worlds):
    chooser = policy(strategy, model)
    for values in sorted(worlds, key=lambda values: values["step"]):
        budget = chooser.budget(build(values))
        assert isinstance(budget, int)
        assert 1 <= budget <= 1_048_576


@given(
    waiting=st.lists(st.integers(1, 20_000), min_size=1, max_size=5),
    more=st.integers(1, 50_000),
)
def test_more_waiting_never_shrinks_the_chunk(waiting, more):
    for strategy in ("throttle", "spread"):
        budgets = [
            policy(strategy, cost_model()).budget(pipeline([5] * 4, **prompts(*queue)))
            for queue in (waiting, [*waiting, more])
        ]
        assert budgets[0] <= budgets[1]


@given(first=st.floats(0.0, 3.0), second=st.floats(0.0, 3.0))
def test_alp_never_shrinks_the_chunk_for_prompts_that_waited_longer(first, second):
    budgets = [
        policy("alp", cost_model()).budget(pipeline([5] * 4, **prompts(6_000, waited_s=waited)))
        for waited in sorted((first, second))
    ]
    assert budgets[0] <= budgets[1]


def broken_models():
    """Cost models after what goes wrong in practice; see test_cost_model for the models alone."""
    first = cost_model(**LONG)
    first.observe(512, ((512, 0),), 0, 0, 30.0 * first.predict(512, ((512, 0),), 0, 0))
    yield "a first sample 30 times too long", first
    jump = cost_model(**LONG)
    for i in range(20):
        tokens = 64 + 200 * i
        jump.observe(tokens, ((tokens, 0),), 0, 0, 10.0 * (0.008 + 4e-5 * tokens))
    yield "a tenfold jump", jump
    one = cost_model(**LONG)
    for _ in range(500):
        one.observe(512, ((512, 0),), 0, 0, 0.03)
    yield "samples of one size", one
    short = cost_model(**LONG)
    for _ in range(50):
        short.observe(50, ((50, 0),), 0, 0, 0.01)
    yield "a short first prompt", short
    idle = cost_model(**LONG)
    idle.observe(512, ((512, 0),), 0, 0, 0.03, now_s=0.0)
    idle.observe(512, ((512, 0),), 0, 0, 0.03, now_s=4000.0)
    yield "an hour idle", idle
    yield "constant times", cost_model(0.02, 0.0)
    curved = BaseTable(TABLE[0], [0.01 + 2e-4 * math.sqrt(n) for n in TABLE[0]])
    yield "negative curvature", CostModel(curved, profiled=True)


@pytest.mark.parametrize(("name", "model"), list(broken_models()))
@pytest.mark.parametrize("strategy", ["alp", "equal_latency", "spread"])
def test_a_long_urgent_prompt_never_gets_the_smallest_chunk(strategy, name, model):
    chooser = policy(strategy, model)
    waiting = prompts(8192, 8192, 8192, 8192, waited_s=1.5)
    budget = chooser.budget(pipeline([0] * 4, **waiting))
    assert 256 <= budget <= 8192
    if not model.trusted:
        assert budget == (8192 if strategy == "equal_latency" else 512)


def test_a_micro_batch_without_decodes_has_no_context():
    empty = MicroBatch(99, 1, 0, 0, 0, ((100, 0),), 0)
    state = pipeline([0] * 4, recent=[empty], **prompts(4_000))
    assert policy("spread", cost_model()).budget(state) == 250
