"""The cost model: what it predicts, learns, refuses, and when it says it is not to be trusted."""

import json
import math
import timeit

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.fit_rows import load_rows
from bench.fit_vidur import load_operators
from bench.logged_runs import load_lengths, load_runs, logged_steps
from bench.predictor import heldout, online, pipeline_points, speed
from tests.shared_data import data_file
from vllm_ppbalance.base_table import BaseTable
from vllm_ppbalance.config import PredictorSettings
from vllm_ppbalance.cost_model import CostModel
from vllm_ppbalance.features import UNITS
from vllm_ppbalance.jumps import JUMP_SAMPLES
from vllm_ppbalance.profile_fit import TERMS, Measured, fit_cost_model
from vllm_ppbalance.roofline import roofline
from vllm_ppbalance.stage_times import StageTimes

SIZES = (64, 128, 256, 512, 1024, 2048, 4096)
# Coefficients of the size an H200 shows with half of a 32B model.
CONTEXT_S, SQUARE_S, PREFIX_S, DECODE_S = 2.6e-8, 1.4e-9, 1.4e-9, 5e-5
SUM_OF_THOUSAND_S = 20e-6  # sum(range(1000)) on the machine the time limits were set on


def true_seconds(tokens, prefills=(), decodes=0, context=0, tile=0):
    """A stage that follows the model's form: what it should learn to the last digits."""
    steps = -(-tokens // tile) * 2e-3 if tile else 0.0
    attention = sum(x * (SQUARE_S * x + PREFIX_S * past) for x, past in prefills)
    return 8e-3 + 4e-5 * tokens + steps + attention + DECODE_S * decodes + CONTEXT_S * context


def point(tokens, prefix=None, decodes=0, context=0, tile=0):
    new = tokens - decodes
    prefills = () if prefix is None else ((new, prefix),)
    seconds = true_seconds(tokens, prefills, decodes, context, tile)
    return Measured(tokens, prefills, decodes, context, seconds)


def profile(tile=0, sizes=SIZES):
    chunks = [point(n, prefix, tile=tile) for n in sizes for prefix in (0, 1024, 8192)]
    decodes = [point(n, decodes=n, context=n * c) for n in (16, 64, 256) for c in (500, 4000)]
    return [*chunks, *([] if tile else decodes)]


def profiled():
    return fit_cost_model(profile())


def cold():
    return roofline(
        15e9, 0.7e15, 4e12, kv_bytes_per_token=131_072, attention_flops_per_pair=655_360
    )


def observe(model, p, seconds=None, **more):
    return model.observe(*p[:4], p.seconds if seconds is None else seconds, **more)


def off(model, p):
    return abs(model.predict(*p[:4]) / p.seconds - 1.0)


def test_a_profile_is_predicted_closely_in_between_and_with_other_prefixes():
    model = profiled()
    for p in (point(700, 3000), point(96, decodes=96, context=96 * 2000), point(1500, 0, 100, 1e5)):
        assert off(model, p) < 0.04
    assert model.trusted
    assert model.num_prefix_lengths == 3


def test_one_time_work_in_some_repeats_does_not_count():
    points = [p for p in profile() for _ in range(3)]
    points[::3] = [p._replace(seconds=30.0 * p.seconds) for p in points[::3]]
    assert max(off(fit_cost_model(points), p) for p in profile()) < 0.03


def test_a_single_point_thirty_times_too_long_does_not_bend_the_others():
    points = profile()
    points[0] = points[0]._replace(seconds=30.0 * points[0].seconds)
    assert max(off(fit_cost_model(points), p) for p in profile()[1:]) < 0.10


@pytest.mark.parametrize("tile", [64, 128, 256])
def test_tile_steps_are_found_and_kept_between_the_profiled_sizes(tile):
    sizes = sorted({n + past for n in range(tile, 2049, tile) for past in (0, tile // 16)})
    model = fit_cost_model(profile(tile, sizes))
    assert model.tile() == tile
    edge = 8 * tile
    step = model.base(edge + 1) - model.base(edge)
    assert step == pytest.approx(2e-3, rel=0.1)
    assert model.base(edge) - model.base(edge - 1) < 2e-4


def test_no_tile_is_found_where_there_is_none():
    assert profiled().tile() == 0


def test_roofline_is_the_longer_of_reading_weights_and_computing():
    model = roofline(1e9, 1e12, 1e11, overhead_s=1e-3)
    assert model.predict(1, (), 1, 1) == pytest.approx(1e-3 + 0.02)
    assert model.predict(8192, (), 0, 0) == pytest.approx(1e-3 + 2.0 * 8192 * 1e9 / 1e12)
    assert not model.trusted


@pytest.mark.parametrize("name", ["stage_parameters", "flops", "bytes_per_s"])
@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf])
def test_roofline_names_the_bad_number(name, value):
    numbers = {"stage_parameters": 1e9, "flops": 1e12, "bytes_per_s": 1e11, name: value}
    with pytest.raises(ValueError, match=name):
        roofline(**numbers)


def test_a_guess_learns_the_stage_and_is_trusted_after_a_while():
    model, points = cold(), profile()
    reasons = []
    for i in range(2000):
        observe(model, points[i % len(points)])
        reasons.append(model.health)
    assert "first 32 stage times" in reasons[0]
    assert reasons[-1] is None
    assert np.median([off(model, p) for p in points]) < 0.03
    assert max(off(model, p) for p in points) < 0.10


def test_nothing_learnt_makes_more_work_faster():
    model, random = profiled(), np.random.RandomState(0)
    for _ in range(500):
        p = profile()[random.randint(len(profile()))]
        observe(model, p, p.seconds * random.uniform(0.2, 3.0))
    times = [model.base(n) for n in range(1, 9000, 7)]
    assert times == sorted(times)
    assert all(seconds >= 0.0 for name, seconds in model.terms().items() if name != "bias")


def test_a_first_sample_thirty_times_too_long_moves_little():
    model = profiled()
    p = point(512, 0)
    observe(model, p, 30.0 * p.seconds)
    assert off(model, p) < 0.5
    assert model.trusted
    for _ in range(30):
        observe(model, p)
    assert off(model, p) < 0.05


def test_constant_times_are_predicted_and_not_trusted():
    points = [p._replace(seconds=0.02) for p in profile()]
    model = fit_cost_model(points)
    assert model.predict(4096, ((4096, 8192),), 0, 0) == pytest.approx(0.02, rel=0.02)
    assert "no longer" in model.health


def test_negative_curvature_is_not_learnt():
    points = [p._replace(seconds=0.01 + 1e-4 * p.num_tokens**0.5) for p in profile()]
    model = fit_cost_model(points)
    for _ in range(5):
        for p in points:
            observe(model, p)
    assert model.terms()["square"] == pytest.approx(0.0, abs=1e-11)
    assert model.predict(65_536, ((65_536, 0),), 0, 0) > model.predict(4096, ((4096, 0),), 0, 0)


def test_all_samples_of_one_size_stay_sane_elsewhere_and_are_not_trusted_from_a_profile():
    model = fit_cost_model([point(512, 0)] * 20)
    assert "1 batch size" in model.health
    guess, truth = cold(), point(512, 0)
    for _ in range(3000):
        observe(guess, truth)
    assert off(guess, truth) < 0.01
    for other in (point(64, 0), point(4096, 0), point(2048, 30_000)):
        assert 0.3 < guess.predict(*other[:4]) / other.seconds < 3.0


@pytest.mark.parametrize("factor", [10.0, 0.1])
def test_a_tenfold_jump_is_noticed_and_followed(factor):
    model, points = profiled(), profile()
    for i in range(300):
        observe(model, points[i % len(points)])
    reasons = []
    for i in range(80):
        p = points[i % len(points)]
        observe(model, p, p.seconds * factor)
        reasons.append(model.health)
    assert "sudden change" in reasons[JUMP_SAMPLES]
    assert reasons[-1] is None
    errors = [off(model, p._replace(seconds=p.seconds * factor)) for p in points]
    assert np.median(errors) < 0.10
    assert max(errors) < 0.35


def test_one_kind_of_batch_that_gets_slower_does_not_slow_the_others():
    model, short, long = profiled(), point(64, decodes=64, context=64 * 500), point(4096, 8192)
    for _ in range(50):
        observe(model, long, 2.0 * long.seconds)
    assert off(model, long._replace(seconds=2.0 * long.seconds)) < 0.05
    assert off(model, short) < 0.35


def test_times_that_follow_nothing_are_not_trusted():
    model, random, points = profiled(), np.random.RandomState(0), profile()
    for i in range(300):
        p = points[i % len(points)]
        observe(model, p, p.seconds * 10.0 ** random.uniform(-1.0, 1.0))
    assert model.health is not None
    assert "off by" in model.health or "sudden change" in model.health


def test_after_an_hour_idle_the_same_is_predicted_and_a_new_speed_learnt_quickly():
    points = profile()

    def used(idle_s):
        model, now_s = profiled(), 0.0
        for i in range(1000):
            now_s += 0.02
            observe(model, points[i % len(points)], now_s=now_s)
        before = model.predict(512, ((512, 0),), 0, 0)
        now_s += idle_s
        observe(model, point(512, 0), now_s=now_s)
        assert model.predict(512, ((512, 0),), 0, 0) == pytest.approx(before, rel=0.05)
        for i in range(12):
            p = points[i % len(points)]
            observe(model, p, 1.3 * p.seconds, now_s=now_s)
        return np.mean([off(model, p._replace(seconds=1.3 * p.seconds)) for p in points])

    assert used(3700.0) < 0.6 * used(1.0)


def test_a_short_first_prompt_before_long_ones():
    model = cold()
    for _ in range(50):
        observe(model, point(50, 0))
    long = point(8192, 0)
    assert model.predict(50, ((50, 0),), 0, 0) < model.predict(*long[:4]) < 5.0 * long.seconds
    for _ in range(40):
        observe(model, long)
    assert off(model, long) < 0.05


@pytest.mark.parametrize("bad", [math.nan, math.inf, 0.0, -1.0])
def test_a_time_that_cannot_be_is_refused(bad):
    model = profiled()
    before = model.to_dict()
    assert not observe(model, point(512, 0), bad)
    assert not observe(model, point(512, 0), weight=bad)
    assert not model.observe(0, (), 0, 0, 0.01)
    assert model.to_dict() == before


def test_an_empty_micro_batch_takes_no_time():
    assert profiled().predict(0, (), 0, 0) == 0.0


def test_only_the_named_terms_are_learnt():
    model = CostModel(BaseTable((64, 512, 4096), (0.01, 0.03, 0.2)), learn=("base", "context"))
    for p in profile() * 20:
        observe(model, p)
    learnt = {name for name, seconds in model.terms().items() if abs(seconds) > 1e-15}
    assert learnt <= {"base", "context"}


MAKERS = {
    "profiled": lambda settings: fit_cost_model(profile(), settings=settings),
    "saved": lambda settings: CostModel.from_dict(profiled().to_dict(), settings),
    "guessed": lambda settings: roofline(15e9, 0.7e15, 4e12, settings=settings),
}


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_settings_change_how_every_model_learns(make):
    p = point(1024, 0)

    def moved(factors, **settings):
        model = make(PredictorSettings(**settings))
        before = model.predict(*p[:4])
        for factor in factors:
            observe(model, p, factor * before)
        return model.predict(*p[:4]) / before - 1.0

    once, drift = [1.3], [*[0.9] * 400, *[1.1] * 40]
    assert moved(once, initial_variance=0.01) < 0.9 * moved(once) < moved(once)
    assert moved([30.0], error_clip=0.1) < 0.5 * moved([30.0]) < 0.5 * moved([30.0], error_clip=1.0)
    assert moved(drift, forgetting=0.9) > moved(drift, forgetting=1.0) + 0.005


@pytest.mark.parametrize(
    "value", [{"forgetting": 0.5}, {"initial_variance": 0.0}, {"error_clip": 2.0}]
)
def test_a_predictor_setting_out_of_bounds_is_refused(value):
    with pytest.raises(ValueError, match=next(iter(value))):
        PredictorSettings(**value)


def test_a_prediction_takes_five_microseconds_and_an_update_thirty():
    """On a machine that is slower than the one these were set on, as much more."""
    samples = [p for p in profile() for _ in range(3)]
    for _ in range(5):  # other work on the machine comes and goes
        predict_s, update_s = speed(samples)
        work_s = min(timeit.repeat(lambda: sum(range(1000)), number=20, repeat=200)) / 20
        slower = max(1.0, work_s / SUM_OF_THOUSAND_S)
        if predict_s < 5e-6 * slower and update_s < 30e-6 * slower:
            return
    raise AssertionError(f"{predict_s:.2e} s a prediction, {update_s:.2e} s an update")


def test_it_survives_a_round_through_json():
    model = profiled()
    for p in profile() * 5:
        observe(model, p, 1.2 * p.seconds)
    again = CostModel.from_dict(json.loads(json.dumps(model.to_dict())))
    for p in profile():
        assert again.predict(*p[:4]) == pytest.approx(model.predict(*p[:4]))
    assert again.to_dict()["terms"] == pytest.approx(model.to_dict()["terms"])
    assert again.trusted


@pytest.mark.parametrize(
    "change",
    [
        {"version": 99},
        {"seconds": [math.nan] * len(SIZES)},
        {"tokens": [3, 2, 1]},
        {"terms": {"base": 1.0}},
        {"terms": dict.fromkeys(UNITS, math.inf)},
        {"terms": None},
        {"tile_s": -1.0},
    ],
)
def test_a_broken_saved_model_is_refused(change):
    with pytest.raises(ValueError, match="not a saved cost model"):
        CostModel.from_dict({**profiled().to_dict(), **change})


def test_a_saved_model_without_a_key_is_refused():
    saved = profiled().to_dict()
    del saved["tokens"]
    with pytest.raises(ValueError, match="tokens"):
        CostModel.from_dict(saved)


def test_points_without_a_usable_time_are_refused():
    with pytest.raises(ValueError, match="none with tokens"):
        fit_cost_model([Measured(64, (), 64, 0, math.nan), Measured(0, (), 0, 0, 1.0)])


@pytest.mark.parametrize(
    ("tokens", "seconds"),
    [((), ()), ((2, 1), (1.0, 1.0)), ((1, 2), (0.0, 1.0)), ((1, 2), (1.0, math.inf)), ((0,), (1,))],
)
def test_a_table_that_is_none_is_refused(tokens, seconds):
    with pytest.raises(ValueError, match=r"must|needs"):
        BaseTable(tokens, seconds)


batches = st.tuples(
    st.lists(st.tuples(st.integers(1, 8192), st.integers(0, 131_072)), max_size=4),
    st.integers(0, 512),
    st.integers(0, 10_000),
)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(batches, st.floats(1e-7, 1e4), st.floats(0.01, 1.0)), max_size=30), batches
)
def test_predictions_are_finite_and_positive_whatever_was_learnt(samples, batch):
    for model in (profiled_once(), cold()):
        model = CostModel.from_dict(model.to_dict())
        for (prefills, decodes, mean), seconds, weight in samples:
            tokens = sum(new for new, _ in prefills) + decodes
            model.observe(tokens, prefills, decodes, decodes * mean, seconds, weight)
        prefills, decodes, mean = batch
        tokens = sum(new for new, _ in prefills) + decodes
        seconds = model.predict(tokens, prefills, decodes, decodes * mean)
        assert math.isfinite(seconds)
        assert seconds > 0.0 or tokens == 0
        more = model.predict(tokens + 64, [*prefills, (64, 100)], decodes, decodes * mean)
        assert more >= seconds or not prefills  # prefill at all switches graphs and the bias


_PROFILED: list[CostModel] = []


def profiled_once():
    if not _PROFILED:
        _PROFILED.append(profiled())
    return _PROFILED[0]


def tandem(pp_size, jobs):
    """(submitted, done) of jobs (submitted, seconds) through like stages."""
    left = [0.0] * pp_size
    for submitted, seconds in jobs:
        at = submitted
        for stage in range(pp_size):
            left[stage] = at = max(at, left[stage]) + seconds
        yield submitted, at


@given(
    st.integers(1, 8),
    st.lists(st.tuples(st.floats(0.0, 0.5), st.floats(0.001, 0.3)), min_size=1, max_size=40),
)
def test_stage_times_are_recovered_from_submissions_and_completions(pp_size, gaps):
    submitted = np.cumsum([gap for gap, _ in gaps]).tolist()
    jobs = [(at, seconds) for at, (_, seconds) in zip(submitted, gaps, strict=True)]
    stages = StageTimes(pp_size)
    for (start, done), (_, seconds) in zip(tandem(pp_size, jobs), jobs, strict=True):
        assert stages.completed(start, done)[0] == pytest.approx(seconds, abs=1e-9)


def test_only_a_batch_the_last_stage_had_waiting_is_measured_by_its_gap():
    stages = StageTimes(2)
    jobs = [(0.0, 0.1), (0.0, 0.1), (0.0, 0.3), (0.0, 0.1)]
    assert [stages.completed(*times)[1] for times in tandem(2, jobs)] == [False, True, False, True]


GRAPH_FILES = (
    "qwen2.5-14b_12layers_middle",
    "qwen2.5-32b_16layers_middle",
    "qwen2.5-32b_16layers_with_head",
)


@pytest.mark.parametrize("name", GRAPH_FILES)
def test_two_thirds_of_the_measured_shapes_are_predicted_from_the_other(name):
    shapes = load_rows(data_file("h200_stage", f"{name}.jsonl"))[1]
    errors = heldout(shapes, 0, TERMS)
    assert np.median(errors) <= 3.0
    assert np.mean(errors) <= 5.0


def test_serving_steps_are_predicted_before_they_are_learnt():
    folder = data_file("h200x2_pp2")
    lengths = load_lengths(data_file("azure", "AzureLLMInferenceTrace_conv.csv"))
    meta, shapes = load_rows(data_file("h200_stage", f"{GRAPH_FILES[1]}.jsonl"))
    saved = fit_cost_model(pipeline_points(shapes, int(meta["layers"]))).to_dict()
    runs = [run for run in load_runs(folder) if run["name"] in ("b512_base", "r15_b1024")]
    for run in runs:
        steps, mismatches = logged_steps(folder, run, lengths)
        assert mismatches == 0
        errors = [error for _, error in online(steps, CostModel.from_dict(saved))]
        assert np.mean(errors) <= 6.0
    assert len(runs) == 2


@pytest.mark.parametrize("model", ["Llama-2-70b-hf", "CodeLlama-34b-Instruct-hf", "internlm-20b"])
def test_the_tile_of_an_a100_is_found(model):
    layer_s = load_operators(data_file("a100_vidur", f"mlp_{model}.csv")).layer_s
    sizes = [n for n in layer_s if n <= 1024 and n % 128 in (0, 16)]
    points = [Measured(n, ((n, 0),), 0, 0, layer_s[n]) for n in sizes]
    assert fit_cost_model(points).tile() == 128
