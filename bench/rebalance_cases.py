"""The runs of the rebalancing report: pipelines, workloads and rates."""

from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import yaml

from bench.batch import BatchShape
from bench.latency import load_profile
from bench.sim_spec import SimSpec
from bench.sim_world import build_workload

CHUNK = 512  # tokens of the fixed budget, where a case names no other
FLAT_TOKENS = 512  # the made-up profile's batches up to this size all take as long


@dataclass(frozen=True, slots=True)
class Case:
    """A pipeline under a load; `load` is the offered work as a share of what the stages can do."""

    title: str
    profile: str
    pp_size: int
    workload: str
    load: float
    window_s: float
    budget: int = CHUNK
    max_num_seqs: int = 512
    kv_cache_gib: float = 96.0
    max_output: int = 300
    cv: float | None = None  # of gamma arrivals; Poisson without


H200, A100 = "h200_qwen2.5-32b", "a100_codellama-34b"
_OF_A100: Any = {"max_num_seqs": 1024, "kv_cache_gib": 45.0}
CASES = (
    Case("H200", H200, 2, "cnn_r", 0.85, 24.0),
    Case("H200", H200, 2, "azure_swapped", 0.7, 24.0),
    Case("H200", H200, 4, "cnn_r", 0.7, 24.0),
    Case("H200", H200, 4, "cnn_r", 0.95, 24.0),
    Case("H200", H200, 4, "azure_swapped", 0.75, 24.0),
    Case("H200", H200, 8, "cnn_r", 0.85, 16.0),
    Case("H200, bursts", H200, 4, "cnn_r", 0.7, 24.0, cv=6.0),
    Case("H200, bursts", H200, 8, "cnn_r", 0.7, 20.0, cv=6.0),
    Case("H200, budget 8192", H200, 4, "azure_conv", 0.6, 30.0, budget=8192),
    Case("A100", A100, 2, "cnn_r", 0.7, 60.0, **_OF_A100),
    Case("A100", A100, 4, "cnn_r", 0.7, 50.0, **_OF_A100),
    Case("A100", A100, 4, "cnn_r", 0.85, 50.0, **_OF_A100),
    Case("A100", A100, 8, "cnn_r", 0.7, 40.0, **_OF_A100),
    Case("flat decodes", "flat", 4, "cnn_r", 0.85, 24.0),
)


def spec_of(case: Case, strategy: str, folder: Path, seed: int) -> SimSpec:
    """The run of a case with a strategy; profiles, made up or measured at start, go to `folder`."""
    profile = case.profile
    if profile == "flat":
        profile = flat_profile(folder / "flat.yaml")
    fields: dict[str, Any] = {
        "policy": {
            "name": strategy,
            "scheduler": "ours",
            "settings": {
                "chunk": {"strategy": "fixed", "fixed_tokens": case.budget},
                "rebalance": {"strategy": strategy},
                "profiling": {"mode": "always", "directory": str(folder)},
            },
        },
        "pp_size": case.pp_size,
        "profile": profile,
        "max_num_seqs": case.max_num_seqs,
        "kv_cache_gib": case.kv_cache_gib,
        "seed": seed,
    }
    if strategy == "tiered":
        fields["policy"]["settings"]["rebalance"]["base_unit"] = "auto"
    workload: dict[str, Any] = {
        "name": case.workload,
        "arrival": "poisson" if case.cv is None else "gamma",
        "window": [0.0, case.window_s],
        "max_output_tokens": case.max_output,
        "seed": seed,
        **({} if case.cv is None else {"cv": case.cv}),
    }
    spec = SimSpec.parse({"workload": {**workload, "rate": 10.0}, **fields})
    rate = round(case.load * capacity(spec), 2)
    return SimSpec.parse({"workload": {**workload, "rate": rate}, **fields})


def capacity(spec: SimSpec) -> float:
    """Requests a second of the slowest stage with all of `max_num_seqs` running, bubbles aside."""
    requests = build_workload(spec)
    prompt = fmean(r.prompt_tokens for r in requests)
    output = fmean(r.output_tokens for r in requests)
    profile = load_profile(spec.profile)
    decodes = spec.max_num_seqs // spec.pp_size
    context = int(decodes * (prompt + output / 2))
    decode = BatchShape((), decodes, decodes, context)
    chunk = BatchShape(((CHUNK, 0),))
    decode_s = profile.stage_seconds(decode, spec.layers[-1], lm_head=True) / decodes
    prompt_s = profile.stage_seconds(chunk, spec.layers[-1], lm_head=True) / CHUNK
    return 1.0 / (output * decode_s + prompt * prompt_s)


def flat_profile(path: Path) -> str:
    """The H200 profile with decodes that cost nothing, as if weights alone were read: made up."""
    source = Path(__file__).resolve().parent.parent / "configs" / "latency_profiles"
    fields = yaml.safe_load((source / f"{H200}.yaml").read_text(encoding="utf-8"))
    table = dict(fields["linear_table"])
    flat_s = table[FLAT_TOKENS]
    above = [[n, s] for n, s in fields["linear_table"] if n > FLAT_TOKENS]
    fields["linear_table"] = [[1, flat_s], [FLAT_TOKENS, flat_s], *above]
    fields["lm_head_table"] = [[1, fields["lm_head_table"][-1][1]], fields["lm_head_table"][-1]]
    fields["attention"]["decode_context_s"] = fields["attention"]["decode_s"] = 0.0
    fields["name"] = "flat"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(fields), encoding="utf-8")
    return str(path)
