"""The cost model a simulated run starts with: what an idle start of the same engine measured.

Every run gets a folder of its own for it, so no run learns from another and the same spec gives
the same bytes; nothing in the user's cache is read or written.
"""

import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path

from bench.engine import Engine
from bench.engine_types import HostTime, RequestSpec
from bench.policies import Policy
from bench.schedulers import make_scheduler
from bench.sim_spec import SimSpec
from bench.sim_world import make_pipeline
from bench.vllm_harness import VllmAdapter
from vllm_ppbalance.sources import load_settings

IDLE_S = 60.0  # longer than measuring may take
MEASURING = {"chunk": {"strategy": "balanced"}, "profiling": {"mode": "always"}}


@contextmanager
def profile_folder(spec: SimSpec, max_model_len: int) -> Iterator[Path | None]:
    """A folder with the profile the run starts from; None where the policy needs none.

    It is empty for `spec.cold_start`. None too where the policy names a folder itself.
    """
    own = spec.policy.settings
    ours = spec.policy.scheduler == "ours"
    if not ours or "directory" in own.get("profiling", {}) or not needs_model(spec):
        yield None
        return
    with tempfile.TemporaryDirectory(prefix="bench-profile-") as name:
        folder = Path(name)
        if not spec.cold_start:
            file_name, text = _measured(_idle_spec(spec), max_model_len)
            (folder / file_name).write_text(text, encoding="utf-8")
        yield folder


def needs_model(spec: SimSpec) -> bool:
    """Whether an idle start under the spec's policy measures the stages."""
    settings = load_settings({"ppbalance": spec.policy.settings}, {}).settings
    return settings.needs_cost_model and settings.profiling.mode == "auto"


def _idle_spec(spec: SimSpec) -> str:
    """The engine alone, whatever it is to serve and by which policy."""
    policy = Policy(name="idle", scheduler="ours", settings=MEASURING)
    idle = spec.model_copy(update={"policy": policy, "predictor_scale": 1.0, "time_limit_s": None})
    fields = idle.as_json()
    fields["workload"] = {"name": "random", "rate": 1.0, "num_prompts": 1}
    fields["slo"] = {"ttft_s": 2.0, "tpot_s": 0.2}
    return json.dumps(fields, sort_keys=True)


@lru_cache(maxsize=64)
def _measured(idle: str, max_model_len: int) -> tuple[str, str]:
    """Name and text of the profile that an idle start writes."""
    spec = SimSpec.parse(json.loads(idle))
    folder = Path(tempfile.mkdtemp(prefix="bench-profile-"))
    try:
        scheduler = make_scheduler(spec, max_model_len, folder)
        engine = Engine(
            scheduler,
            make_pipeline(spec),
            VllmAdapter(),
            host=HostTime(**spec.host.model_dump()),
        )
        engine.run([RequestSpec("first", IDLE_S, 16, 1)])
        scheduler.ppbalance.saver.close()
        (profile,) = folder.glob("*.json")
        return profile.name, profile.read_text(encoding="utf-8")
    finally:
        shutil.rmtree(folder)
