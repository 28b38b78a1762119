"""What a waiting NCCL call costs the GPU that computes beside it: `... nccl_probe --out FILE`.

In vLLM's pipeline a stage computes one micro-batch while its receive of the next, or the broadcast
of sampled tokens, already waits on the GPU for its peer. Such a call occupies multiprocessors. Two
ranks on two GPUs; rank 0 times Qwen2.5-32B layers (matrix products and SiLU, no attention) alone,
beside each waiting call, and while rank 1 computes too. Environment such as
NCCL_MAX_P2P_NCHANNELS applies.
"""

import argparse
import json
import os
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

HIDDEN, QKV, INTERMEDIATE = 5120, 7168, 27648  # Qwen2.5-32B
LAYERS, REPEATS = 4, 20
TOKENS = (64, 128, 256, 384, 512, 768, 1024, 2048, 4096)
ROWS = 128  # of the broadcast


def stage_of(device: Any) -> Callable[[Any], Any]:
    """Some layers with random weights: (tokens, hidden) -> the same."""
    import torch

    torch.manual_seed(0)
    shapes = ((HIDDEN, QKV), (HIDDEN, HIDDEN), (HIDDEN, 2 * INTERMEDIATE), (INTERMEDIATE, HIDDEN))
    layers = [
        [torch.randn(shape, dtype=torch.bfloat16, device=device) / 72 for shape in shapes]
        for _ in range(LAYERS)
    ]

    def stage(x: Any) -> Any:
        for qkv, out, up, down in layers:
            x = (x @ qkv)[:, :HIDDEN] @ out
            gate, value = (x @ up).chunk(2, dim=-1)
            x = (torch.nn.functional.silu(gate) * value) @ down
            x = x / x.abs().max().clamp(min=1e-3)
        return x

    return stage


def timed(stage: Callable[[Any], Any], x: Any) -> float:
    """Median seconds of one pass, by CUDA events."""
    import torch

    marks = [torch.cuda.Event(enable_timing=True) for _ in range(REPEATS + 1)]
    marks[0].record()
    for mark in marks[1:]:
        stage(x)
        mark.record()
    marks[-1].synchronize()
    return float(median(a.elapsed_time(b) for a, b in pairwise(marks))) / 1e3


def rank_main(rank: int, out: str) -> None:
    """One GPU's process; rank 0 measures and writes the file."""
    import torch
    import torch.distributed as dist

    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    dist.init_process_group("nccl", init_method="tcp://127.0.0.1:29611", rank=rank, world_size=2)
    tokens_group, host = dist.new_group(backend="nccl"), dist.new_group(backend="gloo")
    stage = stage_of(device)
    side = torch.cuda.Stream(device)

    def hand_over(tokens: int) -> None:
        parts = [torch.empty(tokens, HIDDEN, dtype=torch.bfloat16, device=device) for _ in "ab"]
        handles.extend(dist.isend(part, 0) if rank else dist.irecv(part, 1) for part in parts)

    def broadcast(tokens: int) -> None:
        with torch.cuda.stream(side):
            sampled = torch.zeros(ROWS, 1, dtype=torch.int64, device=device)
            handles.append(dist.broadcast(sampled, src=1, group=tokens_group, async_op=True))

    def nothing(tokens: int) -> None:
        return

    def both(tokens: int) -> None:
        hand_over(tokens)
        broadcast(tokens)

    waits = {"alone": nothing, "receive": hand_over, "broadcast": broadcast, "both": both}
    rows: list[dict[str, Any]] = []
    handles: list[Any] = []
    both(ROWS)  # the first call of each kind sets up its connection on both sides
    for handle in handles:
        handle.wait()
    torch.cuda.synchronize()
    handles.clear()
    for tokens in TOKENS:
        x = torch.randn(tokens, HIDDEN, dtype=torch.bfloat16, device=device)
        timed(stage, x)
        for name, call in [*waits.items(), ("peer computes", nothing), ("alone again", nothing)]:
            dist.barrier(group=host)
            if rank == 0:
                call(tokens)
                rows.append({"tokens": tokens, "beside": name, "seconds": timed(stage, x)})
            elif name == "peer computes":
                timed(stage, x)
            dist.barrier(group=host)  # the call of rank 0 has waited all the while
            if rank == 1:
                call(tokens)
            for handle in handles:
                handle.wait()
            handles.clear()
            torch.cuda.synchronize()
    if rank == 0:
        names = ("NCCL_MAX_P2P_NCHANNELS", "NCCL_MAX_NCHANNELS", "NCCL_MAX_CTAS")
        about = {k: os.environ.get(k) for k in names}
        gpu, nccl = torch.cuda.get_device_name(0), ".".join(map(str, torch.cuda.nccl.version()))
        made = {"gpu": gpu, "torch": torch.__version__, "nccl": nccl, **about, "rows": rows}
        Path(out).write_text(json.dumps(made, indent=1), encoding="utf-8")
    dist.destroy_process_group()


def table(path: Path) -> str:
    """The ratios to `alone`, as Markdown."""
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
    by = {(row["tokens"], row["beside"]): row["seconds"] for row in rows}
    names = list(dict.fromkeys(row["beside"] for row in rows))
    head = ["tokens", "alone, ms", *names[1:]]
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for tokens in dict.fromkeys(row["tokens"] for row in rows):
        own = by[tokens, "alone"]
        more = [f"{by[tokens, name] / own - 1:+.1%}" for name in names[1:]]
        lines.append(f"| {tokens} | {own * 1e3:.3f} | " + " | ".join(more) + " |")
    return "\n".join(lines)


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    import torch.multiprocessing as mp

    mp.spawn(rank_main, args=(str(arguments.out),), nprocs=2)
    print(table(arguments.out))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
