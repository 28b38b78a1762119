"""A prompt alone: the chunk `balanced` cuts it into, beside every fixed one.

`python -m bench.lone_prompts OUT.md` writes a Markdown table. The engine is idle for a minute
before, in which it measures its stages as it would in service.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from bench.__main__ import _quiet
from bench.long_prompt_report import run_alone
from bench.versions import versions

CASES = (
    ("h200_qwen2.5-32b", 2),
    ("h200_qwen2.5-32b", 4),
    ("h200_qwen2.5-32b", 8),
    ("a100_codellama-34b", 4),
)
LENGTHS = (8_192, 32_768, 131_072)
CHUNKS = (256, 384, 512, 1024, 2048, 4096, 8192)


def row(profile: str, pp_size: int, tokens: int) -> str:
    """One line: the best fixed chunk, the default's, and `balanced`."""
    fixed = {
        chunk: run_alone(
            profile, pp_size, {"strategy": "fixed", "fixed_tokens": chunk}, tokens
        ).ttft_s
        for chunk in CHUNKS
    }
    best = min(fixed, key=lambda chunk: fixed[chunk])
    ours = run_alone(profile, pp_size, {"strategy": "balanced"}, tokens)
    cells = [
        f"{profile}, PP={pp_size}",
        str(tokens),
        f"{fixed[best]:.3f} ({best})",
        f"{fixed[CHUNKS[-1]]:.3f}",
        f"{ours.ttft_s:.3f} ({ours.chunks} chunks)",
        f"{ours.ttft_s / fixed[best] - 1.0:+.1%}",
        f"{ours.ttft_s / fixed[CHUNKS[-1]] - 1.0:+.1%}",
    ]
    return "| " + " | ".join(cells) + " |"


def main(argv: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.lone_prompts", description=__doc__)
    parser.add_argument("out", type=Path, help="Markdown file to write")
    parser.add_argument("--lengths", type=int, nargs="*", default=LENGTHS, help="prompt tokens")
    args = parser.parse_args(argv)
    _quiet()
    lines = [
        "Written by `python -m bench.lone_prompts`. One prompt alone, TTFT in seconds; simulated",
        "on latency profiles measured on these GPUs, `max_num_batched_tokens` 8192. Versions: "
        + ", ".join(f"{name} {version}" for name, version in versions().items())
        + ".",
        "",
        "| profile, stages | prompt tokens | best fixed chunk | fixed 8192 | balanced "
        "| against the best | against 8192 |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for profile, pp_size in CASES:
        for tokens in args.lengths:
            lines.append(row(profile, pp_size, tokens))
            print(lines[-1], flush=True)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
