"""A fudge, named as one: how much longer prompt work takes in a real pipeline than alone.

The step logs of the real two-H200 runs tell two things apart from the measured rows, both printed
by `python -m bench validate DIR --excess`:

- A micro-batch with prompt tokens that meets an otherwise idle pipeline (only small ones before
  it) takes as long as the rows say up to 130 tokens and from 1,100 on, but up to 0.13 ms a layer
  longer in between, with its peak at 350 to 450 tokens. Host time does not explain it: at 512
  tokens it is slower than the rows with their host time left in. Nor does padding: there is no
  step at a captured graph size.
- Large ones that follow each other take longer still: nothing at 512 tokens, about 2 % at 1,024,
  7 % at 2,048. One number, 3 %, stands for it.

A later run timed every stage by CUDA events and logged the clocks (`bench.gpu.stage_report`, two
H200): a micro-batch of 512 tokens takes 27.4 ms after decodes, 29.8 as the second of its kind in a
row, 31.8 from the fourth on, 32.8 from the fifteenth: the GPU reaches its 700 W and the SM clock
falls from 1,980 to about 1,560 MHz. So what is added here is mostly the clock under sustained load,
which rows measured with a pause after every step do not see, least in the middle sizes.

The numbers are read off those excesses by eye, to round values; the 3 % is what brings the
saturated runs right. That they hold for other models, layer counts and GPUs is assumed.
"""

from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from bench.batch import BatchShape
from bench.pipeline import StageTime


@dataclass(frozen=True, slots=True)
class PipelineOverhead:
    """What a pipeline adds to the stage time of a micro-batch with prompt tokens.

    `layer_s` are (tokens, seconds a layer) to interpolate between, 0 outside. A micro-batch of
    more than `large_tokens` right after another such one takes `sustained` times as long.
    """

    layer_s: tuple[tuple[int, float], ...]
    large_tokens: int
    sustained: float

    def wrap(self, alone: StageTime, num_layers: int) -> StageTime:
        """The stage time in a pipeline of a stage that takes `alone`; it remembers one step."""
        extra = [seconds * num_layers for seconds in self._dense()]
        large, sustained = self.large_tokens, self.sustained
        after_large = False

        def seconds(shape: BatchShape) -> float:
            nonlocal after_large
            if not shape.prefills:
                after_large = False
                return alone(shape)
            tokens = shape.num_tokens
            stage_s = alone(shape) + (extra[tokens] if tokens < len(extra) else 0.0)
            is_large = tokens > large
            if is_large and after_large:
                stage_s *= sustained
            after_large = is_large
            return stage_s

        return seconds

    def _dense(self) -> list[float]:
        """Seconds a layer at 0, 1, 2, ... tokens."""
        dense = [0.0] * self.layer_s[0][0]
        for (left, before), (right, after) in pairwise(self.layer_s):
            dense += [before + (after - before) * i / (right - left) for i in range(right - left)]
        return dense

    def as_json(self) -> dict[str, Any]:
        """For run records."""
        return asdict(self)


# By latency profile: only where real pipeline runs exist.
CALIBRATED = {
    "h200_qwen2.5-32b": PipelineOverhead(
        layer_s=((130, 0.0), (350, 130e-6), (450, 130e-6), (512, 77e-6), (1100, 0.0)),
        large_tokens=400,
        sustained=1.03,
    )
}
