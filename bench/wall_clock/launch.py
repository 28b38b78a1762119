"""From a deployment to the arguments and the environment of `vllm serve`. vLLM-free."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from bench.latency import load_profile
from bench.policies import Policy
from bench.wall_clock import model
from bench.wall_clock.settings import ENTRY, WallClockSettings

BLOCK_TOKENS = 16  # as on a GPU; the CPU platform would take 128


@dataclass(frozen=True)
class Deployment:
    """What stands behind one wall-clock server; the defaults are those of `bench simulate`.

    `folder` keeps the model folder and the plugin's profiles. `stage_layers` is for uneven splits.
    """

    policy: Policy
    folder: Path
    settings: WallClockSettings = field(default_factory=WallClockSettings)
    pp_size: int = 4
    mode: Literal["async", "sync"] = "async"
    max_num_seqs: int = 512
    max_num_batched_tokens: int = 8192
    max_model_len: int = model.MAX_POSITION
    prefix_caching: bool = False
    stage_layers: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if self.policy.scheduler not in ("stock", "ours"):
            raise ValueError(f"policy {self.policy.name!r}: must be stock or ours")
        if not 1 <= self.pp_size <= 64:
            raise ValueError(f"pp_size = {self.pp_size}: must be 1 to 64")
        budget = self.policy.budget
        if budget is not None and budget > self.max_num_batched_tokens:
            raise ValueError(
                f"policy {self.policy.name!r}: budget {budget} must be at most "
                f"max_num_batched_tokens = {self.max_num_batched_tokens}"
            )
        layers = load_profile(self.settings.profile).num_hidden_layers
        split = self.stage_layers
        if split is not None and (len(split) != self.pp_size or sum(split) != layers):
            raise ValueError(
                f"stage_layers = {list(split)}: must be {self.pp_size} numbers that sum to {layers}"
            )

    @property
    def name(self) -> str:
        """Folder name of all that a measured stage time depends on."""
        words = [load_profile(self.settings.profile).name, f"pp{self.pp_size}", self.settings.link]
        words += map(str, self.stage_layers or ())
        if not self.settings.pipeline_overhead:
            words.append("no_overhead")
        return "-".join([*words, self.mode])

    def make_model(self) -> Path:
        """The model folder, written where it is not there yet."""
        profile = load_profile(self.settings.profile)
        return model.make(self.folder / "models" / profile.name, profile)

    def arguments(self, extra: Sequence[str] = ()) -> list[str]:
        """Words after `vllm serve MODEL`; `extra` come last and win."""
        words = [
            *("--worker-cls", "bench.wall_clock.worker.Worker"),
            *("--distributed-executor-backend", "mp"),
            *("--pipeline-parallel-size", str(self.pp_size)),
            *("--max-num-seqs", str(self.max_num_seqs)),
            *("--max-num-batched-tokens", str(self.policy.budget or self.max_num_batched_tokens)),
            *("--max-model-len", str(self.max_model_len)),
            *("--block-size", str(BLOCK_TOKENS)),
            "--enable-prefix-caching" if self.prefix_caching else "--no-enable-prefix-caching",
            "--async-scheduling" if self.mode == "async" else "--no-async-scheduling",
            "--enforce-eager",
            *("--additional-config", json.dumps(self.additional_config())),
        ]
        if self.policy.scheduler == "ours":
            words += ["--scheduler-cls", "vllm_ppbalance.Scheduler"]
        return [*words, *extra]

    def words(self) -> list[str]:
        """Options of `python -m bench.wall_clock.serve` that ask for this deployment."""
        policy = self.policy
        words = [
            *(
                "--policy",
                json.dumps(policy.model_dump(include={"scheduler", "budget", "settings"})),
            ),
            *("--profile", self.settings.profile, "--link", self.settings.link),
            *("--kv-cache-gib", str(self.settings.kv_cache_gib)),
            *("--pp-size", str(self.pp_size), "--mode", self.mode),
            *("--max-num-seqs", str(self.max_num_seqs)),
            *("--max-num-batched-tokens", str(self.max_num_batched_tokens)),
            *("--max-model-len", str(self.max_model_len)),
            *("--folder", str(self.folder)),
        ]
        if self.stage_layers is not None:
            words += ["--stage-layers", ",".join(map(str, self.stage_layers))]
        words += ["--prefix-caching"] * self.prefix_caching
        words += ["--no-overhead"] * (not self.settings.pipeline_overhead)
        return words

    def additional_config(self) -> dict[str, Any]:
        """For the workers, and for the plugin where it schedules."""
        config: dict[str, Any] = {ENTRY: self.settings.model_dump()}
        if self.policy.scheduler == "ours":
            own = dict(self.policy.settings)
            directory = {"directory": str(self.folder / "profiles" / self.name)}
            own["profiling"] = directory | dict(own.get("profiling", {}))
            config["ppbalance"] = own
        return config

    def environment(self) -> dict[str, str]:
        """Variables that every process of the server must see."""
        variables = {
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            # At the default of 5 s a client may pick a connection that the server is closing.
            "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "600",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_USE_V2_MODEL_RUNNER": "1" if self.mode == "async" else "0",
        }
        if self.stage_layers is not None:
            variables["VLLM_PP_LAYER_PARTITION"] = ",".join(map(str, self.stage_layers))
        return variables
