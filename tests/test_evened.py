"""The replay of a run with even decodes, which tells what rebalancing could remove."""

import pytest

pytest.importorskip("vllm")

from dataclasses import replace

from bench.batch import BatchShape
from bench.evened import decode_bubbles, even_shapes, removable, replay
from bench.rebalance_cases import CASES, spec_of
from bench.rebalance_runs import steady_tok_per_s
from bench.sim_world import build_workload
from bench.simulate import simulate


def decodes(count, context=None):
    return BatchShape((), count, count, 100 * count if context is None else context)


def test_decode_only_micro_batches_of_a_round_become_equal():
    shapes = [
        decodes(8),
        decodes(1, 700),
        BatchShape(((50, 0),), 9, 9, 900),
        decodes(0),
        decodes(5),
    ]
    even = even_shapes(shapes, 4)
    assert even[:2] == [decodes(4, 750), decodes(5, 750)]
    assert even[2:] == shapes[2:]


def served(tmp_path):
    """Requests in four groups, the first by far the largest: so are the micro-batches they fill."""
    case = replace(CASES[2], window_s=2.0, max_output=30, budget=8192)
    spec = spec_of(case, "off", tmp_path, 0)
    together = [
        replace(r, arrival_s=0.03 * (max(i - 80, 0) // 10))
        for i, r in enumerate(build_workload(spec))
    ]
    return spec, simulate(spec, requests=together)


@pytest.mark.scheduler
def test_the_replay_of_a_run_as_it_was_is_that_run(tmp_path):
    spec, outcome = served(tmp_path)
    steps = outcome.run.steps
    again = replay(spec, steps, [step.shape for step in steps])
    for ours, run in zip(again, outcome.stages, strict=True):
        assert [b.step for b in ours] == [b.step for b in run]
        assert [b.end_s for b in ours] == pytest.approx([b.end_s for b in run], abs=1e-6)


@pytest.mark.scheduler
def test_what_is_removable_is_what_the_even_replay_does_not_have(tmp_path):
    spec, outcome = served(tmp_path)
    steps = outcome.run.steps
    shapes = [step.shape for step in steps]
    even = even_shapes(shapes, spec.pp_size)
    found = removable(spec, steps, 0.0)
    assert found == pytest.approx(
        decode_bubbles(outcome.stages, shapes, 0.0)
        - decode_bubbles(replay(spec, steps, even), even, 0.0),
        abs=1e-9,
    )
    assert found > 0.02


def test_steady_throughput_counts_the_tokens_of_the_second_half_only():
    class Served:
        token_times_s = (60.5, 62.0, 63.9, 64.0, 70.0)

    class Outcome:
        class run:
            requests = {"a": Served}  # noqa: RUF012

    assert steady_tok_per_s(Outcome, 4.0) == 1.0
