"""Small runs for tests of the simulator."""

from bench.policies import parse_policy
from bench.sim_spec import SimSpec

FREE_HOST = {
    "schedule_s": 0.0,
    "schedule_per_request_s": 0.0,
    "schedule_per_new_request_s": 0.0,
    "update_s": 0.0,
    "update_per_request_s": 0.0,
}


def small_spec(policy="stock:512", workload=None, **fields):
    """Eight short requests on two stages, with little KV cache: the blocks take time to make."""
    sent = {
        "name": "random",
        "rate": 20.0,
        "num_prompts": 8,
        "prompt_range": [200, 800],
        "output_range": [5, 20],
        **(workload or {}),
    }
    return SimSpec.parse(
        {
            "workload": sent,
            "policy": parse_policy(policy).model_dump(),
            "pp_size": 2,
            "kv_cache_gib": 8.0,
            **fields,
        }
    )
