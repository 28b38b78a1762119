"""The balanced chunk on plain values: no vLLM."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.test_policies import batch
from vllm_ppbalance.chunk import BalancedChunk
from vllm_ppbalance.config import Settings
from vllm_ppbalance.prefill_rates import PrefillRates
from vllm_ppbalance.state import Decode, PipelineState, Waiting

FIXED_S, TOKEN_S = 5e-3, 20e-6


class Stage:
    """Exact stage times; `tile` tokens are computed at a time."""

    health = None

    def __init__(self, tile=1, attention_s=0.0):
        self.tile = tile
        self.attention_s = attention_s

    def predict(self, num_tokens, prefills, decodes, context):
        pairs = sum(new * (before + new / 2) for new, before in prefills)
        tiles = -(-num_tokens // self.tile)
        return FIXED_S + TOKEN_S * tiles * self.tile + self.attention_s * pairs


def prompts(count, tokens=1000, waited_s=0.0, prefix=0):
    return [Waiting(f"p{i}", tokens, prefix, waited_s) for i in range(count)]


def pipeline(waiting=(), cohorts=(8, 8, 8, 8), step=100, **fields):
    """Four stages, `cohorts` decodes each, everything that waits not yet admitted."""
    recent = [batch(step - 4 + i, size) for i, size in enumerate(cohorts) if size]
    values = {
        "step": step,
        "now_s": 0.0,
        "pp_size": 4,
        "max_budget": 8192,
        "min_budget": 1,
        "decode_budget": cohorts[0],
        "num_ready": cohorts[0],
        "ready": [Decode(f"r{i}", 100, 5, 0, 0.0) for i in range(cohorts[0])],
        "in_flight": [b for b in recent if b.step > step - 4],
        "recent": recent,
        "num_waiting": len(waiting),
        "waiting": waiting,
        "waiting_tokens": sum(prompt.new_tokens for prompt in waiting),
        "num_running": sum(cohorts),
        "max_num_seqs": 512,
    }
    return PipelineState(**{**values, **fields})


def balanced(stage=None, **settings):
    return BalancedChunk(Settings.model_validate(settings), stage or Stage())


def test_prompts_are_spread_over_four_rounds_beside_the_decodes():
    policy = balanced()
    assert policy.budget(pipeline(prompts(4, 1024))) == 320  # 8 + 4096 / 16 = 264, on the grid
    assert policy.reason == "backlog"
    assert policy.target_s == pytest.approx(FIXED_S + 320 * TOKEN_S)


def test_with_nothing_to_compute_the_budget_is_the_smallest():
    assert balanced().budget(pipeline()) == 128


def test_the_cap_is_where_more_tokens_win_little():
    policy = balanced(slo_ttft=3600.0)
    budget = policy.budget(pipeline(prompts(100, 1000)))
    assert policy.reason == "throughput cap"
    rates = PrefillRates(Settings(), Stage()).at(pipeline())
    best = rates[-1].prefill
    slower = [r for r in rates if r.tokens < budget]
    assert all(r.prefill < 0.9 * best for r in slower)
    assert next(r for r in rates if r.tokens == budget).prefill >= 0.9 * best


def test_a_burst_is_answered_in_the_same_step_by_the_rate_its_deadlines_ask_for():
    policy = balanced()
    calm = policy.budget(pipeline(prompts(1, 200), step=101))
    burst = policy.budget(pipeline(prompts(64, 1000), step=102))
    assert calm == 128
    assert policy.reason == "fastest: deadlines at risk"
    assert burst > 1000


def test_a_deadline_that_a_smaller_budget_meets_gets_no_larger_one():
    policy = balanced(chunk={"balanced_throughput_ratio": 0.3})
    # 20,000 tokens, 0.8 s left: about 25,000 tokens a second.
    late = policy.budget(pipeline(prompts(20, 1000, waited_s=0.0)))
    assert policy.reason == "deadline"
    rates = {r.tokens: r.prefill for r in PrefillRates(Settings(), Stage()).at(pipeline())}
    smaller = [size for size in rates if size < late]
    assert rates[late] >= 20_000 / 1.0
    assert all(rates[size] < 20_000 / 0.7 for size in smaller)


@pytest.mark.parametrize("slo_tpot", [0.05, 0.1, 0.2, 0.4])
def test_a_round_stays_within_the_tpot_target_whatever_waits(slo_tpot):
    budget = balanced(slo_tpot=slo_tpot).budget(pipeline(prompts(500, 2000, waited_s=3.0)))
    assert 4 * Stage().predict(budget, ((budget - 8, 0),), 8, 800) <= 0.95 * slo_tpot


def test_a_target_that_decodes_alone_miss_does_not_choke_the_prompts():
    stage = Stage()
    decodes_s = stage.predict(200, (), 200, 20_000)
    policy = balanced(stage, slo_tpot=decodes_s / 10)
    budget = policy.budget(pipeline(prompts(50), (200, 200, 200, 200), num_running=300))
    seconds = stage.predict(budget, ((budget - 200, 0),), 200, 20_000)
    assert 1.1 * decodes_s < seconds <= 1.25 * decodes_s


def test_no_budget_is_given_that_a_smaller_one_outruns():
    stage = Stage(tile=256)
    policy = balanced(stage)
    for count in range(1, 80):
        state = pipeline(prompts(count, 700), step=100 + 4 * count)
        assert (policy.budget(state) % 256 == 0) or policy.budget(state) < 256


def test_without_free_seats_the_stage_time_does_not_grow():
    policy, waiting = balanced(), prompts(200, 1000, waited_s=3.0)
    full = pipeline(waiting, (128, 128, 128, 128), num_running=512)
    free = pipeline(waiting, (128, 128, 128, 128), num_running=256)
    assert policy.budget(full) < 300
    assert policy.reason == "no free seats"
    assert balanced().budget(free) < balanced().budget(pipeline(waiting, (8, 8, 8, 8)))


@pytest.mark.parametrize(("rounds", "least", "most"), [(5, 0.8, 1.0), (200, 0.0, 0.5)])
def test_seats_go_by_the_stage_times_of_a_requests_life(rounds, least, most):
    """Nearly all seats are taken: a short lull binds the budget little, a long one does."""
    policy, waiting = balanced(), prompts(20, 1000, waited_s=3.0)
    for step in range(100, 100 + 4 * 200, 4):
        recent = [batch(step - 1, 1000)]
        before = policy.budget(pipeline(waiting, step=step, num_running=480, recent=recent))
    for step in range(1000, 1000 + 4 * rounds, 4):
        policy.budget(pipeline(step=step, num_running=480, recent=[batch(step - 1, 16)]))
    recent = [batch(1999, 16)]
    after = policy.budget(pipeline(waiting, step=2000, num_running=480, recent=recent))
    assert before >= 900
    assert least * before <= after <= most * before


def test_a_prompt_alone_is_cut_for_fill_and_drain():
    length, a, b, behind = 8192, FIXED_S, TOKEN_S, 3
    best = (length * a / (b * behind)) ** 0.5
    budget = balanced().budget(pipeline(prompts(1, length), (0, 0, 0, 0)))
    assert budget == pytest.approx(best, rel=0.15)


def test_a_prompt_alone_keeps_its_chunk_to_its_end():
    policy = balanced()
    first = policy.budget(pipeline(prompts(1, 8192), (0, 0, 0, 0), step=100))
    rest = Waiting("p0", 8192 - first, first, 0.1, running=True)
    state = pipeline([rest], (0, 0, 0, 0), step=101, num_waiting=0, num_prefilling=1)
    assert policy.budget(state) == first


def test_long_prefixes_shrink_the_budget_within_the_tpot_target():
    stage = Stage(attention_s=2e-9)
    short = balanced(stage).budget(pipeline(prompts(30, 4000, waited_s=3.0)))
    long = balanced(stage).budget(pipeline(prompts(1, 120_000, waited_s=3.0, prefix=1)))
    assert long < short


def test_draft_tokens_count_as_tokens():
    plain = pipeline(prompts(4, 1024))
    drafting = pipeline(prompts(4, 1024), decode_budget=8 * 16)
    assert balanced().budget(drafting) >= balanced().budget(plain) + 64


def test_without_a_trusted_model_it_gives_the_fallback_and_says_so():
    policy = BalancedChunk(Settings(), None)
    assert policy.budget(pipeline(prompts(9))) == 512
    assert policy.reason == "fallback: there is no cost model"
    stage = Stage()
    stage.health = "it is new"
    policy = balanced(stage)
    assert policy.budget(pipeline(prompts(9))) == 512
    assert policy.reason == "fallback: it is new"


@given(
    cohorts=st.lists(st.integers(0, 200), min_size=4, max_size=4),
    lengths=st.lists(st.tuples(st.integers(1, 200_000), st.floats(0, 1e4)), max_size=40),
    running=st.integers(0, 2000),
    kv_free=st.floats(0, 1),
    max_budget=st.integers(1, 40_000),
)
def test_any_state_gets_a_budget_within_vllms(cohorts, lengths, running, kv_free, max_budget):
    waiting = [Waiting(f"p{i}", new, 0, waited) for i, (new, waited) in enumerate(lengths)]
    policy = balanced(Stage(tile=128, attention_s=1e-9))
    for step in (100, 101, 104):
        state = pipeline(
            waiting,
            tuple(cohorts),
            step,
            num_running=running,
            kv_free=kv_free,
            max_budget=max_budget,
        )
        budget = policy.budget(state)
        assert isinstance(budget, int)
        assert 1 <= budget <= max_budget
        assert policy.reason


def test_what_the_model_has_learnt_since_changes_the_budget_under_the_same_load():
    policy = balanced(stage := Stage())
    waiting = prompts(500, 2000, waited_s=3.0)
    before = policy.budget(pipeline(waiting, step=100))
    stage.tile = 1536  # the GPU is another one now
    for step in range(104, 104 + 4 * 20, 4):
        after = policy.budget(pipeline(waiting, step=step))
    assert before % 1536
    assert after == 1536


def test_another_prompt_alone_gets_a_chunk_of_its_own_at_once():
    policy = balanced()
    policy.budget(pipeline(prompts(1, 128_000), (0, 0, 0, 0), step=100))
    short = [Waiting("other", 2000, 0, 0.0)]
    budget = policy.budget(pipeline(short, (0, 0, 0, 0), step=101))
    assert budget == balanced().budget(pipeline(short, (0, 0, 0, 0), step=101))
