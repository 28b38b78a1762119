"""Decode-decode bubbles that no rebalancing removes: a run replayed with its decodes made even.

Micro-batches whose stages differ (an LM head on the last one) leave bubbles between equal decode
batches as well. What could be removed is what a run has more of them than its own replay, in which
the decode-only micro-batches of each round of P carry equal decodes and equal context, at no cost.
"""

from collections.abc import Sequence
from dataclasses import replace

from bench.batch import BatchShape
from bench.bubbles import Busy, Load, bubble_ratio, stage_use
from bench.engine_types import StepRecord
from bench.sim_spec import SimSpec
from bench.sim_world import make_pipeline


def even_shapes(shapes: Sequence[BatchShape], pp_size: int) -> list[BatchShape]:
    """The shapes, with the decode-only ones of each round of `pp_size` made equal."""
    even = list(shapes)
    for first in range(0, len(shapes), pp_size):
        indices = range(first, min(first + pp_size, len(shapes)))
        alone = [i for i in indices if shapes[i].decodes and not shapes[i].prefills]
        for field in ("decodes", "decode_tokens", "decode_context"):
            total = sum(getattr(shapes[i], field) for i in alone)
            for place, i in enumerate(alone):
                share = total * (place + 1) // len(alone) - total * place // len(alone)
                even[i] = replace(even[i], **{field: share})
    return even


def replay(
    spec: SimSpec, steps: Sequence[StepRecord], shapes: Sequence[BatchShape]
) -> list[list[Busy]]:
    """Busy times of the stages for `shapes` in place of the run's own, everything else alike.

    A step is scheduled as long after the completion that made room for it as it was in the run.
    """
    pipeline, host = make_pipeline(spec), spec.host
    on_device = spec.mode == "async"
    depth = spec.pp_size + on_device
    done: list[float] = []
    at_s = 0.0
    for index, (step, shape) in enumerate(zip(steps, shapes, strict=True)):
        if index < depth:
            at_s = step.schedule_s
        else:
            at_s = max(at_s, done[index - depth] + step.schedule_s - steps[index - depth].done_s)
        new = sum(before == 0 for _, before in shape.prefills)
        at_s += host.schedule_s + new * host.schedule_per_new_request_s
        at_s += (step.shape.decodes + len(shape.prefills)) * host.schedule_per_request_s
        source = index - spec.pp_size
        sampled = on_device and source >= 0 and steps[source].shape.num_tokens > 0
        tokens_s = done[source] if sampled else 0.0
        done.append(pipeline.submit(step.step, shape, at_s, tokens_s))
    return [[Busy(*interval) for interval in stage] for stage in pipeline.intervals]


def decode_bubbles(
    stages: Sequence[Sequence[Busy]], shapes: Sequence[BatchShape], from_s: float
) -> float:
    """Share of stage time, from `from_s` to the last end, lost between decode batches.

    `shapes` are those of all steps, in order.
    """
    loads = {i: Load(shape.prefill_tokens, shape.decodes) for i, shape in enumerate(shapes)}
    work = [(from_s, stages[-1][-1].end_s)]
    return bubble_ratio(stage_use(stages, loads, work)).decode_decode_s


def removable(spec: SimSpec, steps: Sequence[StepRecord], from_s: float) -> float:
    """Share of stage time that even decodes would take off the decode-decode bubbles of a run.

    `from_s` is when its first request came.
    """
    shapes = [step.shape for step in steps]
    even = even_shapes(shapes, spec.pp_size)
    as_is = decode_bubbles(replay(spec, steps, shapes), shapes, from_s)
    return as_is - decode_bubbles(replay(spec, steps, even), even, from_s)
