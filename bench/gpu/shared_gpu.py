"""A vLLM worker for several pipeline stages on one GPU: `--worker-cls bench.gpu.shared_gpu.Worker`.

Needs CUDA MPS with a share of the GPU for each process, and an NCCL that takes several ranks of one
GPU: 2.30 or later with NCCL_MULTI_RANK_GPU_ENABLE=1.
"""

from unittest.mock import patch

import torch
from vllm.v1.worker.gpu_worker import Worker as GpuWorker


class Worker(GpuWorker):  # type: ignore[misc]
    """vLLM's own worker, which takes the first GPU whatever its rank."""

    def init_device(self) -> None:
        """As vLLM's, which insists on a GPU for every rank."""
        self.local_rank = 0
        ranks = self.parallel_config.local_world_size
        with patch.object(torch.accelerator, "device_count", lambda: ranks):
            super().init_device()
