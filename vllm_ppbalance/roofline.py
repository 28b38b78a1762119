"""A first guess at stage times from a model's shape and a GPU's data sheet, before any is measured.

Source of the model: S. Williams, A. Waterman, D. Patterson, "Roofline: an insightful visual
performance model for multicore architectures", CACM 52 (2009).
"""

from math import isfinite

from vllm_ppbalance.base_table import BaseTable
from vllm_ppbalance.config import PredictorSettings
from vllm_ppbalance.cost_model import PUBLISHED, CostModel
from vllm_ppbalance.features import UNITS, reference_units

FLOPS_PER_PARAMETER = 2.0  # a multiply and an add for each token
SIZES = (1, 16, 32, 64, 128, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 8192, 16384)


def roofline(
    stage_parameters: float,
    flops: float,
    bytes_per_s: float,
    *,
    parameter_bytes: float = 2.0,
    kv_bytes_per_token: float = 0.0,
    attention_flops_per_pair: float = 0.0,
    overhead_s: float = 0.0,
    settings: PredictorSettings = PUBLISHED,
) -> CostModel:
    """A cost model of one stage on one GPU that is to learn the rest online.

    `stage_parameters` are the weights a token passes through in the stage, on one GPU.
    `flops` (1/s) and `bytes_per_s` are what the GPU reaches, not its peaks. `kv_bytes_per_token`
    are the stage's keys and values of one token; `attention_flops_per_pair` the stage's work for
    one query and one key: 4 * head_dim * heads * layers. `overhead_s` is paid once a micro-batch.
    Raises ValueError where a number is not finite or out of range.
    """
    positive = {
        "stage_parameters": stage_parameters,
        "flops": flops,
        "bytes_per_s": bytes_per_s,
        "parameter_bytes": parameter_bytes,
    }
    others = {
        "kv_bytes_per_token": kv_bytes_per_token,
        "attention_flops_per_pair": attention_flops_per_pair,
        "overhead_s": overhead_s,
    }
    for name, value in (positive | others).items():
        if not isfinite(value) or value < 0.0 or (name in positive and value == 0.0):
            raise ValueError(f"{name} = {value} must be finite and not below 0")
    weights_s = stage_parameters * parameter_bytes / bytes_per_s
    token_s = stage_parameters * FLOPS_PER_PARAMETER / flops
    table = BaseTable(SIZES, [overhead_s + max(weights_s, n * token_s) for n in SIZES])
    pair_s = attention_flops_per_pair / flops
    seconds = dict.fromkeys(UNITS, 0.0) | {
        "base": 1.0,
        "context": kv_bytes_per_token / bytes_per_s,
        "square": pair_s / 2.0,  # a token sees half of its own chunk
        "prefix": pair_s,
        "past": kv_bytes_per_token / bytes_per_s,
    }
    units = reference_units(table)
    theta = [seconds[name] / unit for name, unit in units.items()]
    return CostModel(table, theta, settings=settings)
