"""Greedy tokens of stock vLLM and of this plugin on real GPUs: `python -m bench.gpu.same_tokens`.

A tiny model in bfloat16, the same requests for each: Model Runner V1 and V2, synchronous and
asynchronous scheduling. Every engine runs in a process of its own, all at the same time. Exit
status 1 where `--scheduler-cls vllm_ppbalance.Scheduler` gives other tokens than stock.
"""

import argparse
import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

REQUESTS, SEED, LIMIT_S = 48, 3, 300.0
NAMED = "vllm_ppbalance.Scheduler"
SCHEDULERS: dict[str, tuple[str | None, dict[str, Any]]] = {
    "stock": (None, {}),
    "stock again": (None, {}),
    "default": (NAMED, {}),
    "decodes moved": (NAMED, {"chunk": {"strategy": "fixed"}}),
    "our code, stock's budget": (
        "vllm_ppbalance.plugin.StageScheduler",
        {"chunk": {"strategy": "fixed"}, "rebalance": {"strategy": "off"}},
    ),
    "our code, default": ("vllm_ppbalance.plugin.StageScheduler", {}),
}


def requests() -> list[tuple[list[int], int]]:
    """(prompt, output tokens) of each; prompts in several chunks among them."""
    rng = random.Random(SEED)
    lengths = [rng.choice((20, 90, 400, 1500)) + rng.randint(0, 60) for _ in range(REQUESTS)]
    return [(rng.choices(range(4, 260), k=n), rng.randint(16, 96)) for n in lengths]


def engine(folder: Path, name: str, pp_size: int, asynchronous: bool) -> dict[str, Any]:
    """In a process of its own: the tokens, and which classes scheduled."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM, SamplingParams

    scheduler, own = SCHEDULERS[name]
    own = own | {"profiling": {"directory": str(folder / f"profiles-{name}")}}
    llm = LLM(
        str(folder / "model"),
        dtype="bfloat16",
        max_model_len=4096,
        max_num_batched_tokens=2048,
        enable_prefix_caching=False,
        enforce_eager=True,
        kv_cache_memory_bytes=1 << 30,
        gpu_memory_utilization=0.05,
        pipeline_parallel_size=pp_size,
        distributed_executor_backend="mp" if pp_size > 1 else None,
        async_scheduling=asynchronous,
        scheduler_cls=scheduler,
        additional_config={"ppbalance": own} if scheduler else {},
    )
    sent = requests()
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for _, n in sent]
    prompts = [{"prompt_token_ids": prompt} for prompt, _ in sent]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    found: Any = llm.llm_engine.engine_core
    used = found.engine_core.scheduler
    return {
        "scheduler": [c.__name__ for c in (type(used), *type(used).__bases__)],
        "failed": getattr(used, "ppbalance_failed", False),
        "tokens": [list(output.outputs[0].token_ids) for output in outputs],
    }


def start(
    folder: Path, name: str, pp_size: int, runner: int, mode: str
) -> "subprocess.Popen[bytes]":
    """A process for one engine, its output in a file."""
    words = [str(folder), "--one", name, "--pp", str(pp_size), "--mode", mode]
    environment = {**os.environ, "VLLM_USE_V2_MODEL_RUNNER": str(runner - 1)}
    with result_file(folder, name, runner, mode).with_suffix(".log").open("wb") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "bench.gpu.same_tokens", *words, "--runner", str(runner)],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
        )


def result_file(folder: Path, name: str, runner: int, mode: str) -> Path:
    """Where an engine leaves its tokens."""
    word = "".join(c for c in name if c.isalnum())
    return folder / f"{word}-v{runner}-{mode}.json"


def compare(folder: Path, names: list[str], runner: int, mode: str) -> list[dict[str, Any]]:
    """One row a scheduler: requests with other tokens than stock's, None where it gave none."""
    rows, stock = [], None
    for name in names:
        path = result_file(folder, name, runner, mode)
        found = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        tokens = found.get("tokens")
        stock = tokens if name == "stock" else stock
        other = None
        if tokens is not None and stock is not None:
            other = sum(a != b for a, b in zip(tokens, stock, strict=True))
        about = {key: found.get(key) for key in ("scheduler", "failed")}
        rows.append({"name": name, "runner": runner, "mode": mode, "other": other, **about})
    return rows


def run_all(folder: Path, pp_size: int) -> list[dict[str, Any]]:
    """Every combination, side by side."""
    from bench.tiny_model import make

    make(folder / "model")
    others = ["decodes moved"] if pp_size > 1 else [n for n in SCHEDULERS if "our code" in n]
    names = ["stock", "stock again", "default", *others]
    settings = [(runner, mode) for runner in (1, 2) for mode in ("sync", "async")]
    processes = [
        start(folder, name, pp_size, runner, mode) for runner, mode in settings for name in names
    ]
    for process in processes:
        try:
            process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            process.kill()
    return [row for runner, mode in settings for row in compare(folder, names, runner, mode)]


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--pp", type=int, default=1)
    parser.add_argument("--one", choices=SCHEDULERS, help="only this engine, in this process")
    parser.add_argument("--runner", type=int, choices=(1, 2), default=2)
    parser.add_argument("--mode", choices=("sync", "async"), default="async")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    if args.one:
        found = engine(args.folder, args.one, args.pp, args.mode == "async")
        path = result_file(args.folder, args.one, args.runner, args.mode)
        path.write_text(json.dumps(found), encoding="utf-8")
        return 0
    rows = run_all(args.folder, args.pp)
    (args.folder / "results.json").write_text(json.dumps(rows, indent=1), encoding="utf-8")
    for row in rows:
        print(json.dumps(row))
    return int(any(row["other"] != 0 for row in rows if row["name"] == "default"))


if __name__ == "__main__":
    raise SystemExit(main())
