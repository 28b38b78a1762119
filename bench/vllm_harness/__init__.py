"""vLLM's real schedulers without a model or a GPU: all that the simulator imports of vllm.

`build` makes a scheduler, `requests` what it is to serve, and `adapter` drives it for
`bench.engine`: the model runner is a function that answers with deterministic tokens.
"""

from bench.vllm_harness.adapter import VllmAdapter, batch_shape, sample_token
from bench.vllm_harness.build import build_scheduler, model_dir

__all__ = ["VllmAdapter", "batch_shape", "build_scheduler", "model_dir", "sample_token"]
