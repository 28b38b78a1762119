"""Tiered and auto on plain values and in a small pipeline: no vLLM."""

from collections import Counter
from itertools import pairwise
from statistics import quantiles

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.decode_world import Served, World, load
from tests.test_policies import batch, pipeline, play
from vllm_ppbalance.base_table import BaseTable
from vllm_ppbalance.config import Settings
from vllm_ppbalance.cost_model import CostModel
from vllm_ppbalance.features import UNITS, reference_units
from vllm_ppbalance.lazy import Lazy
from vllm_ppbalance.profile_fit import Measured, fit_cost_model
from vllm_ppbalance.rebalance import Auto, EvenShare, Off, Tiered, make_rebalance_policy
from vllm_ppbalance.rebalance.choose import slack_s
from vllm_ppbalance.rebalance.loads import cohort_loads, next_context
from vllm_ppbalance.rebalance.plan import KEPT_ROUNDS, RoundPlan, find_places, make_plan, still_good
from vllm_ppbalance.state import Decode, LatencyTotals, MicroBatch

SIZES = (1, 64, 512, 1024, 8192)


def cost_model(fixed=0.008, token=4e-5, **terms):
    """A trusted model of `fixed` + `token` * tokens seconds, and of `terms` as in UNITS."""
    table = BaseTable(SIZES, [fixed + token * n for n in SIZES])
    units = reference_units(table)
    theta = [1.0, *(terms.get(name, 0.0) / units[name] for name in UNITS if name != "base")]
    return CostModel(table, theta, profiled=True)


def make(strategy, model=None, **knobs):
    settings = Settings.model_validate({"rebalance": {"strategy": strategy, **knobs}})
    return make_rebalance_policy(settings, model)


def decodes(count, **fields):
    values = {"context_tokens": 100, "output_tokens": 5, "holds_in_a_row": 0, "last_token_s": 0.0}
    return [Decode(f"r{i}", **{**values, **fields}) for i in range(count)]


def touched(reverse):
    raise AssertionError("the ready decodes were read")


TILED_S = 5e-3  # of each started tile


def tile_model(tile=128):
    """Fitted on stage times with a step at each tile."""
    sizes = sorted({*range(32, 1100, 32), *range(33, 1100, 64)})
    points = [
        Measured(n, ((n, 0),), 0, 0, 5e-3 + TILED_S * -(-n // tile) + 1e-6 * n) for n in sizes
    ]
    model = fit_cost_model(points)
    assert (model.tile(), model.trusted) == (tile, True)
    return model


# tiered


def test_tiered_holds_a_micro_batch_down_to_the_tile_while_the_excess_is_small():
    assert len(make("tiered").hold(pipeline([150, 130, 130, 130]))) == 22
    assert make("tiered").hold(pipeline([128, 140, 140, 130])) == {}


@pytest.mark.parametrize(("alive", "held"), [(716, 51), (717, 0)])
def test_tiered_gives_up_the_tile_at_load_alpha_of_a_tile_over_it(alive, held):
    """0.4 of 512 over 512 is 716.8; from there the next tile is filled."""
    cohorts = [179, 179, 179, alive - 3 * 179]
    assert len(make("tiered").hold(pipeline(cohorts))) == held


def test_tiered_below_the_first_tile_parks_only_beyond_a_whole_unit():
    assert make("tiered").hold(pipeline([128, 0, 0, 0])) == {}
    assert len(make("tiered").hold(pipeline([140, 0, 0, 0]))) == 12


def test_tiered_with_headroom_parks_nobody_of_its_own():
    busy = {"waiting_tokens": 1025, "num_waiting": 1}
    assert make("tiered").hold(pipeline([150, 130, 130, 130], **busy)) == {}
    assert make("tiered").hold(pipeline([150, 130, 130, 130], **{**busy, "waiting_tokens": 1024}))
    assert make("tiered").hold(pipeline([150, 130, 130, 130], **busy, kv_free=0.1))
    assert make("tiered", waiting_tok_threshold=2000).hold(pipeline([150, 130, 130, 130], **busy))


def test_tiered_takes_parked_ones_in_up_to_the_mean_and_leaves_the_rest_out():
    ready = [*decodes(40), *(Decode(f"p{i}", 9, 5, 1, 0.0) for i in range(30))]
    policy = make("tiered")
    assert policy.hold(pipeline([140, 0, 0, 0], 99))
    holds = policy.hold(pipeline([70, 50, 50, 50], 100, ready=ready))
    assert len(holds) == 70 - 220 // 4
    assert {name[0] for name in holds} == {"p"}


def test_tiered_never_parks_anybody_for_a_whole_round():
    ready = [*decodes(20), *(Decode(f"p{i}", 9, 5, 3, 0.0) for i in range(140))]
    holds = make("tiered").hold(pipeline([160, 130, 130, 130], ready=ready))
    assert set(holds) == {f"r{i}" for i in range(20)}


def test_tiered_mode_says_who_is_parked():
    state = pipeline([130, 130, 130, 130])
    assert set(make("tiered", mode="tpot_first").hold(state)) == {"r0", "r1"}
    assert set(make("tiered", mode="e2e_first").hold(state)) == {"r129", "r128"}


def test_tiered_mode_auto_turns_to_the_oldest_when_token_gaps_near_their_target():
    policy = make("tiered", tpot_first_ratio=0.9)  # of 0.2 s

    def parked(step, gap_s, seen=[0.0, 0]):  # noqa: B006
        seen[0], seen[1] = seen[0] + gap_s, seen[1] + 1
        totals = LatencyTotals(0.0, 0, seen[0], seen[1])
        return set(policy.hold(pipeline([129, 130, 130, 130], step, totals=totals)))

    assert parked(100, 0.17) == {"r128"}
    assert parked(104, 0.19) == {"r0"}
    assert parked(106, 0.01) == {"r0"}
    assert parked(108, 0.01) == {"r128"}


def test_tiered_unit_auto_is_the_profiles_tile_or_128():
    state = pipeline([80, 70, 70, 70])
    assert len(make("tiered", tile_model(64), base_unit="auto").hold(state)) == 16
    assert make("tiered", tile_model(64)).hold(state) == {}
    for model in (None, cost_model()):
        assert make("tiered", model, base_unit="auto").hold(state) == {}
        assert len(make("tiered", model, base_unit="auto").hold(pipeline([129] * 4))) == 1


def test_tiered_reads_no_request_where_nobody_was_parked():
    policy = make("tiered")
    assert policy.hold(pipeline([70, 50, 50, 50], 100, ready=Lazy(touched))) == {}
    assert policy.hold(pipeline([140, 0, 0, 0], 101))
    with pytest.raises(AssertionError, match="were read"):
        policy.hold(pipeline([70, 50, 50, 50], 102, ready=Lazy(touched)))
    assert policy.hold(pipeline([70, 50, 50, 50], 103, ready=Lazy(touched))) == {}


# auto


def test_auto_fills_the_deficits_and_goes_no_farther():
    holds = make("auto", cost_model()).hold(pipeline([80, 60, 50, 50]))
    assert Counter(holds.values()) == {2: 10, 3: 10}


def test_auto_leaves_room_for_what_the_cohorts_between_pass_on():
    holds = make("auto", cost_model()).hold(pipeline([80, 70, 40, 50]))
    assert Counter(holds.values()) == {2: 10, 3: 10}


def test_auto_does_nothing_where_decodes_cost_nothing():
    flat = cost_model(0.02, 1e-9, square=1e-9)
    flat._table.seconds[-1] *= 3  # so that it is trusted: large prompts do cost time
    assert flat.trusted
    for cohorts in ([80, 60, 50, 50], [64, 0, 0, 0], [40, 20, 30, 10]):
        assert make("auto", flat).hold(pipeline(cohorts)) == {}


def test_auto_reads_no_request_while_nothing_is_to_be_done():
    state = pipeline([60, 60, 61, 59], ready=Lazy(touched))
    assert make("auto", cost_model()).hold(state) == {}
    flat = pipeline([90, 40, 40, 40], ready=Lazy(touched))
    assert make("auto", cost_model(0.02, 1e-6)).hold(flat) == {}


def test_auto_keeps_its_plan_while_the_decodes_alive_hardly_change():
    state = pipeline([60, 60, 60, 60])
    plan = make_plan(cost_model(), state)
    at_once, late = state._replace(step=104), state._replace(step=100 + 4 * KEPT_ROUNDS)
    assert still_good(plan, at_once)
    assert not still_good(plan, late)
    assert still_good(plan, at_once._replace(num_ready=61))
    assert not still_good(plan, at_once._replace(num_ready=64))
    tiled = make_plan(tile_model(), state)
    assert not still_good(tiled, at_once)


def test_auto_acts_from_its_margin_on():
    """8 ms + 40 us a decode: two decodes over the mean of 50 are 0.8 % of the round."""
    state = pipeline([52, 50, 49, 49])
    assert len(make("auto", cost_model(), margin=0.007).hold(state)) == 2
    assert make("auto", cost_model(), margin=0.009).hold(state) == {}


def test_auto_spreads_a_full_cohort_at_once_after_a_stall():
    holds = make("auto", cost_model()).hold(pipeline([16, 0, 0, 0]))
    assert Counter(holds.values()) == {1: 4, 2: 4, 3: 4}


def test_auto_fills_the_pipeline_at_half_load_where_a_static_cap_leaves_half_empty():
    """16 decodes, max_num_seqs 32, cap 8: vLLM #57433 gives 8/8/0/0."""
    policy = make("auto", cost_model())
    assert play(policy, [16, 0, 0, 0], 8) == [4] * 8


def test_auto_counts_decodes_on_their_way_to_a_cohort():
    holds = make("auto", cost_model()).hold(pipeline([8, 0, 0, 0], parked={101: 8}))
    assert Counter(holds.values()) == {3: 4}  # cohort 2 gets what the parked are too many by


def test_auto_goes_by_time_not_by_count():
    """8 long contexts outweigh 20 short ones: one of them goes to each of the other cohorts."""
    model = cost_model(0.001, 1e-6, context=1e-7)
    ready = [Decode(f"long{i}", 20_000, 5, 0, 0.0) for i in range(8)]
    others = [MicroBatch(97 + i, 20, 20, 20, 20 * 500, (), 20) for i in range(3)]
    state = pipeline(
        [8, 20, 20, 20],
        ready=ready,
        in_flight=others,
        recent=[MicroBatch(96, 8, 8, 8, 160_000, (), 8), *others],
    )
    assert sorted(make("auto", model).hold(state).values()) == [1, 2, 3]
    swapped = pipeline(
        [20, 8, 20, 20],
        ready=decodes(20, context_tokens=500),
        in_flight=[MicroBatch(97, 8, 8, 8, 160_000, (), 8), *others[1:]],
        recent=[MicroBatch(96, 20, 20, 20, 10_000, (), 20), *others],
    )
    assert make("auto", model).hold(swapped) == {}


def with_prompt(cohorts, tokens, **fields):
    return pipeline(cohorts, waiting_tokens=tokens, num_waiting=1, planned_prefill=tokens, **fields)


def test_auto_keeps_fewer_decodes_beside_a_prompt():
    policy = make("auto", cost_model())
    assert policy.hold(pipeline([48, 47, 47, 44])) == {}
    assert set(policy.hold(with_prompt([48, 47, 47, 44], 200)).values()) == {3}


def test_auto_does_not_hold_for_a_prompt_that_takes_the_room_left():
    """The budget is full with or without the held ones: as many prompt tokens come in."""
    state = with_prompt([50, 50, 50, 40], 200)
    assert make("auto", cost_model()).hold(state)
    assert make("auto", cost_model()).hold(state._replace(waiting_tokens=9000)) == {}


@pytest.mark.parametrize("decode_s", [0.0, 1e-6, 1e-5, 1e-4, 3e-4])
def test_auto_looks_no_further_where_prompts_take_all_room_only_if_that_changes_nothing(
    decode_s, monkeypatch
):
    state = with_prompt([50, 45, 45, 40], 200)._replace(waiting_tokens=9000)
    model = cost_model(decodes=decode_s)
    soon = make("auto", model).hold(state)
    monkeypatch.setattr(Auto, "_prompts_refill", lambda *_: False)
    assert make("auto", model).hold(state) == soon
    assert bool(soon) == (decode_s >= 1e-4)


def test_auto_does_not_hold_for_a_prompt_where_the_next_micro_batches_are_full():
    assert make("auto", cost_model()).hold(with_prompt([46, 47, 47, 47], 200)) == {}


def test_auto_does_not_hold_for_a_prompt_where_few_decodes_gain_by_it():
    assert make("auto", cost_model()).hold(with_prompt([5, 5, 5, 4], 200)) == {}


def test_auto_stays_at_the_tile_while_that_serves_all_sooner():
    """140 a micro-batch: two tiles for 12 decodes, or 128 and each sits out one turn in twelve."""
    policy = make("auto", tile_model())
    assert len(policy.hold(pipeline([140, 140, 140, 140]))) == 12
    assert set(policy.hold(pipeline([140, 140, 140, 140], 200)).values()) == {1}
    assert make("auto", tile_model()).hold(pipeline([220, 220, 220, 220])) == {}
    assert make("auto", tile_model()).hold(pipeline([128, 140, 140, 140])) == {}


def test_auto_makes_room_in_the_tile_for_a_short_prompt():
    holds = make("auto", tile_model()).hold(with_prompt([120, 100, 100, 100], 60))
    assert len(holds) == 120 + 60 - 128


def test_auto_holds_those_with_most_slack():
    """At 11 s, under 0.2 s a token: what is left of 0.2 * tokens since the first token."""
    ready = [
        Decode("late", 100, 5, 0, 10.9, 10.1),  # 0.1 s
        Decode("long", 100, 50, 0, 10.9, 5.0),  # 4 s
        Decode("new", 100, 2, 0, 10.9, 10.9),  # 0.3 s
        *(Decode(f"tight{i}", 100, 5, 0, 10.9, 9.0) for i in range(17)),  # -1 s
    ]
    model = cost_model(2e-3)
    for others, held in (([18, 18, 17], ["long"]), ([17, 17, 17], ["long", "new"])):
        state = pipeline([20, *others], ready=ready, now_s=11.0)
        assert list(make("auto", model).hold(state)) == held


def test_slack_without_the_first_tokens_time_goes_by_tokens():
    assert slack_s(Decode("a", 9, 10, 0, 1.0), 50.0, 0.2) == pytest.approx(2.0)
    assert slack_s(Decode("a", 9, 10, 0, 1.0, 1.0), 4.0, 0.2) == pytest.approx(-1.0)


def test_auto_does_not_hold_the_same_decode_again_within_pp_size_rounds():
    policy = make("auto", cost_model())
    rounds = [set(policy.hold(pipeline([24, 20, 20, 16], 100 + 4 * i))) for i in range(5)]
    assert all(rounds[:4])
    assert not rounds[0] & (rounds[1] | rounds[2] | rounds[3])
    assert rounds[0] & rounds[4]


def test_auto_without_a_trusted_model_acts_on_large_differences_only():
    untrusted = cost_model(0.02, 0.0)
    assert not untrusted.trusted
    for model in (None, untrusted):
        policy = make("auto", model)
        assert policy.hold(pipeline([27, 20, 20, 20])) == {}
        large = pipeline([40, 20, 20, 20])
        assert policy.hold(large) == EvenShare().hold(large) != {}


def test_auto_follows_a_model_once_it_is_trusted_and_no_longer():
    model = cost_model()
    policy = make("auto", model)
    small = [24, 22, 22, 20]
    assert policy.hold(pipeline(small, 100))
    model.trust.mean_error = 0.9
    later = 100 + 4 * KEPT_ROUNDS
    assert policy.hold(pipeline(small, later)) == {}
    model.trust.mean_error = 0.0
    assert policy.hold(pipeline(small, later + 4))


def test_the_cost_model_is_asked_for_where_it_is_needed():
    def needs(**knobs):
        tree = {"chunk": {"strategy": "fixed"}, "rebalance": knobs}
        return Settings.model_validate(tree).needs_cost_model

    assert needs(strategy="auto")
    assert needs(strategy="tiered", base_unit="auto")
    assert not needs(strategy="tiered")
    assert not needs(strategy="even_share", base_unit="auto")


def test_each_strategy_has_its_policy():
    kinds = {"off": Off, "even_share": EvenShare, "tiered": Tiered, "auto": Auto}
    for strategy, kind in kinds.items():
        assert type(make(strategy, cost_model())) is kind


COHORTS = st.lists(st.integers(0, 40), min_size=2, max_size=8)


@given(COHORTS, st.integers(0, 3000), st.sampled_from(["auto", "tiered"]), st.booleans())
def test_holds_are_of_ready_decodes_for_less_than_a_round_and_never_of_all(
    cohorts, prompt, strategy, tiled
):
    model = tile_model(64) if tiled else cost_model(context=1e-8)
    holds = make(strategy, model, base_unit="auto").hold(with_prompt(cohorts, prompt))
    assert set(holds) <= {f"r{i}" for i in range(cohorts[0])}
    assert all(1 <= steps < len(cohorts) for steps in holds.values())
    assert len(holds) < max(cohorts[0], 1)


def play_named(policy, cohorts, steps):
    """As `play`, but each decode keeps its name; returns the decodes of each step."""
    pp_size = len(cohorts)
    due = {100 + i: [f"c{i}d{j}" for j in range(size)] for i, size in enumerate(cohorts)}
    ran = []
    for step in range(100, 100 + steps):
        sizes = [len(due.get(step + i, ())) for i in range(pp_size)]
        ready = [Decode(name, 100, 5, 0, 0.0) for name in due.pop(step, ())]
        hold = policy.hold(pipeline(sizes, step, ready=ready))
        for decode in ready:
            delay = hold.get(decode.request_id, pp_size)
            due.setdefault(step + delay, []).append(decode.request_id)
        ran.append(len(ready) - len(hold))
    return ran


@given(COHORTS)
def test_auto_evens_out_any_cohorts(cohorts):
    """At 100 us a decode beside 1 ms; the round may be one decode longer than the best."""
    pp_size, total = len(cohorts), sum(cohorts)
    ran = play_named(make("auto", cost_model(1e-3, 1e-4)), cohorts, 3 * pp_size * pp_size)
    assert sum(ran[-pp_size:]) == total
    assert max(ran[-pp_size:]) <= -(-total // pp_size) + 1


def test_contexts_follow_the_requests_into_their_next_micro_batch():
    chunks = ((50, 0), (30, 100), (200, 0))  # the last one ends no prompt
    assert next_context(MicroBatch(1, 7, 4, 4, 400, chunks, 6)) == 400 + 50 + 130
    assert next_context(MicroBatch(1, 4, 4, 4, 400, (), 3)) == 300
    assert next_context(MicroBatch(1, 5, 4, 4, 400, ((50, 0),), 4)) == 400
    assert next_context(batch(1, 0, 100)) == 0


def test_loads_tell_every_cohorts_decodes_and_context():
    state = pipeline([4, 3, 0, 2], parked={102: 5})
    assert cohort_loads(state) == [(4, 400), (3, 300), (5, 500), (2, 200)]
    assert cohort_loads(pipeline([0, 0], recent=[])) == [(0, 0), (0, 0)]


# in a pipeline


def stage(tokens, prefills, num_decodes, context):
    return 5e-3 + 4e-5 * tokens + 1e-8 * context


def serve(strategy, pp_size=4, seed=1, stage=stage, model=None, seconds=6.0, **knobs):
    tree = {"chunk": {"strategy": "fixed"}, "rebalance": {"strategy": strategy, **knobs}}
    model = cost_model(5e-3, 4e-5, context=1e-8) if model is None else model
    requests = load(seed, 60.0, seconds, outputs=(60, 200))
    world = World(Settings.model_validate(tree), pp_size, stage, requests, model=model)
    return world.run(100_000)


def tpots(world):
    cuts = quantiles([request.tpot_s for request in world.ended], n=100)
    return cuts[49], cuts[89], cuts[98]


@pytest.mark.parametrize("pp_size", [2, 4, 8])
def test_auto_shortens_the_time_per_token(pp_size):
    """Median, P90 and P99, each summed over eight loads: one load alone is as much chance."""
    off = [serve("off", pp_size, seed) for seed in range(1, 9)]
    auto = [serve("auto", pp_size, seed) for seed in range(1, 9)]
    assert [len(w.ended) for w in auto] == [len(w.ended) for w in off]
    ours, stock = (
        [sum(cut) for cut in zip(*map(tpots, runs), strict=True)] for runs in (auto, off)
    )
    assert all(a < b for a, b in zip(ours, stock, strict=True))


def test_auto_at_the_tile_beats_off():
    def tiled(tokens, prefills, num_decodes, context):
        return 5e-3 + TILED_S * -(-tokens // 64) + 1e-6 * tokens

    off = serve("off", stage=tiled, model=tile_model(64))
    auto = serve("auto", stage=tiled, model=tile_model(64))
    assert auto.own.num_moves > 1000
    for ours, stock in zip(tpots(auto), tpots(off), strict=True):
        assert ours < 0.9 * stock


def test_auto_holds_nobody_twice_within_pp_size_rounds_in_a_pipeline():
    world = serve("auto", 4, seconds=3.0)
    held = [request.holds for request in world.ended if len(request.holds) > 1]
    assert len(held) > 10
    for steps in held:
        assert min(b - a for a, b in pairwise(steps)) >= 16


@pytest.mark.parametrize("pp_size", [2, 4, 8])
def test_after_a_stall_the_pipeline_is_full_within_pp_size_steps(pp_size):
    settings = Settings.model_validate({"rebalance": {"strategy": "auto"}})
    together = [Served(f"r{i}", 0.0, 8, 40) for i in range(8 * pp_size)]
    world = World(settings, pp_size, stage, together, model=cost_model(5e-3)).run(4 * pp_size)
    first = next(i for i, size in enumerate(world.sizes) if size)
    assert world.sizes[first : first + 2 * pp_size] == [8] * 2 * pp_size


def test_decodes_whose_time_goes_by_a_context_not_yet_seen_move_nowhere():
    """A plan that was kept, and no decode among the last micro-batches."""
    state = pipeline((4, 0, 0, 0), recent=[], in_flight=[])
    plan = RoundPlan(100, 4, 1, 8e-3, 100.0, 1.0, (1, 100.0), 0, 1)
    assert find_places(state, plan) == []
