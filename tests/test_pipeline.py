"""The virtual pipeline against an independent simpy model of the same tandem queue."""

import random

import pytest

from bench.batch import BatchShape
from bench.pipeline import LINKS, Activations, Interval, Link, Pipeline

EMPTY = BatchShape()
ONE = BatchShape(decodes=1, decode_tokens=1, decode_context=1)
ACTIVATIONS = Activations(hidden_size=5120)


def seconds_per_token(seconds):
    return lambda shape: seconds * shape.num_tokens


def random_case(seed):
    """Stages' seconds per token, links, and batches as (ready time, shape)."""
    rng = random.Random(seed)
    rates = [rng.uniform(1e-6, 5e-5) for _ in range(rng.randint(1, 6))]
    links = [Link(rng.uniform(1e9, 1e11), rng.uniform(0, 1e-3)) for _ in rates[1:]]
    batches, now = [], 0.0
    for _ in range(rng.randint(1, 60)):
        now += rng.choice([0.0, rng.expovariate(200.0)])
        shape = EMPTY if rng.random() < 0.2 else BatchShape(((rng.randint(1, 4096), 0),))
        batches.append((now, shape))
    return rates, links, batches


def simpy_done_times(rates, links, batches):
    """Processes that queue at resources; simpy grants them first come, first served."""
    simpy = pytest.importorskip("simpy")
    env = simpy.Environment()
    stages = [simpy.Resource(env) for _ in rates]
    wires = [simpy.Resource(env) for _ in links]
    done = {}

    def flow(index, ready_s, shape):
        yield env.timeout(ready_s)
        for hop, (rate, stage) in enumerate(zip(rates, stages, strict=True)):
            with stage.request() as turn:
                yield turn
                yield env.timeout(rate * shape.num_tokens)
            if hop < len(links) and shape.num_tokens:
                num_bytes = shape.num_tokens * 5120 * 2 * 2
                with wires[hop].request() as turn:
                    yield turn
                    yield env.timeout(num_bytes / links[hop].bandwidth_bytes_s)
                yield env.timeout(links[hop].latency_s)
        done[index] = env.now

    for index, (ready_s, shape) in enumerate(batches):
        env.process(flow(index, ready_s, shape))
    env.run()
    return [done[index] for index in range(len(batches))]


@pytest.mark.parametrize("seed", range(60))
def test_equals_simpy(seed):
    rates, links, batches = random_case(seed)
    if seed % 3 == 0:
        links = []
    pipeline = Pipeline(
        [seconds_per_token(rate) for rate in rates],
        links=links or None,
        activations=ACTIVATIONS if links else None,
    )
    ours = [pipeline.submit(i, shape, ready) for i, (ready, shape) in enumerate(batches)]
    theirs = simpy_done_times(rates, links, batches)
    full = [i for i, (_, shape) in enumerate(batches) if shape.num_tokens]
    assert [ours[i] for i in full] == pytest.approx([theirs[i] for i in full], abs=1e-9)
    # A batch on a slow link has left its stage: an empty one overtakes it there, harmlessly.
    if not links:
        assert ours == pytest.approx(theirs, abs=1e-9)


def test_an_empty_batch_costs_nothing_and_keeps_its_place():
    pipeline = Pipeline([lambda _: 1.0, lambda _: 2.0])
    assert pipeline.submit(0, ONE, 0.0) == 3.0
    assert pipeline.submit(1, EMPTY, 0.0) == 3.0
    assert pipeline.submit(2, ONE, 0.0) == 5.0
    assert pipeline.intervals[1] == [Interval(0, 1.0, 3.0), Interval(2, 3.0, 5.0)]


def test_the_slowest_stage_sets_the_pace():
    pipeline = Pipeline([lambda _: 0.25, lambda _: 1.0, lambda _: 0.5])
    done = [pipeline.submit(i, ONE, 0.0) for i in range(10)]
    assert done == [1.75 + i for i in range(10)]


def test_a_batch_waits_for_the_tokens_it_feeds_on():
    pipeline = Pipeline([lambda _: 1.0, lambda _: 5.0])
    first = pipeline.submit(0, ONE, 0.0)
    pipeline.submit(1, ONE, 0.0, tokens_ready_s=first)
    assert pipeline.intervals[0][1] == Interval(1, 6.0, 7.0)


def test_a_held_last_stage_delays_what_follows():
    pipeline = Pipeline([lambda _: 1.0])
    pipeline.submit(0, ONE, 0.0)
    pipeline.hold_last_stage(4.0)
    assert pipeline.submit(1, ONE, 0.0) == 5.0


def test_transfer_time_by_hand():
    shape = BatchShape(((1024, 0),))
    pipeline = Pipeline(
        [lambda _: 0.0, lambda _: 0.0], links=Link(1e9, 1e-3), activations=ACTIVATIONS
    )
    num_bytes = 1024 * 5120 * 2 * 2
    assert pipeline.submit(0, shape, 0.0) == pytest.approx(num_bytes / 1e9 + 1e-3)
    assert pipeline.submit(1, shape, 0.0) == pytest.approx(2 * num_bytes / 1e9 + 1e-3)


def test_links_are_ranked():
    names = ("nvlink", "pcie5", "pcie4", "net100g")
    speeds = [LINKS[name].bandwidth_bytes_s for name in names]
    assert speeds == sorted(speeds, reverse=True)


def test_noise_repeats_with_its_seed():
    def run(seed):
        pipeline = Pipeline([lambda _: 1.0, lambda _: 1.0], noise=0.1, seed=seed)
        return [pipeline.submit(i, ONE, 0.0) for i in range(20)]

    assert run(1) == run(1)
    assert run(1) != run(2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"stages": []}, "at least one stage"),
        ({"stages": [len], "noise": -0.1}, "noise must be >= 0"),
        ({"stages": [len] * 3, "links": [LINKS["pcie4"]], "activations": ACTIVATIONS}, "2 links"),
        ({"stages": [len] * 2, "links": LINKS["pcie4"]}, "need activations"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        Pipeline(**arguments)


def test_a_link_needs_bandwidth():
    with pytest.raises(ValueError, match="bandwidth > 0"):
        Link(0.0, 0.0)


def test_a_negative_stage_time_is_refused():
    with pytest.raises(ValueError, match="must be >= 0 s"):
        Pipeline([lambda _: -1.0]).submit(0, ONE, 0.0)
