"""What a stage of a deployment takes for a micro-batch: the profile, its layers, the overhead.

The virtual-time pipeline and the wall-clock one both take it from here.
"""

from collections.abc import Sequence

from bench.batch import BatchShape
from bench.latency import LatencyProfile
from bench.pipeline import StageTime
from bench.pipeline_overhead import PipelineOverhead


def stage_time(
    profile: LatencyProfile,
    layers: Sequence[int],
    index: int,
    overhead: PipelineOverhead | None = None,
) -> StageTime:
    """Seconds of stage `index` of those with `layers` layers each, by micro-batch.

    The embedding is on the first, the LM head on the last.
    """
    seconds, num_layers = profile.compiled, layers[index]
    first, last = index == 0, index == len(layers) - 1

    def alone(shape: BatchShape) -> float:
        return seconds(shape, num_layers, first, last)

    return alone if overhead is None else overhead.wrap(alone, num_layers)
