"""What equal-latency chunks are worth: `python -m bench.long_prompt_report OUT.md`, Markdown.

One prompt alone in the pipeline: its TTFT under fixed chunks, under equal-latency chunks with
several first chunks, and with perfect overlap, which no chunking can beat. The engine is idle for a
minute before, in which `equal_latency` measures the stages as it would in service.
"""

import argparse
import tempfile
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.__main__ import _quiet
from bench.batch import BatchShape
from bench.sim_spec import SimSpec, profile_of
from bench.simulate import Outcome, simulate
from bench.versions import versions
from bench.workloads import BenchRequest

PROFILES = ("h200_qwen2.5-32b", "a100_codellama-34b")
STAGES = (4, 8, 16)
CHUNKS = (512, 1024, 2048, 4096, 8192)
DEFAULT = CHUNKS[-1]  # vLLM's own budget in a server on such GPUs
IDLE_S = 60.0
ALIGN = 64  # tokens, as in `chunk.equal_alignment`
LIMITS = 100  # longest chunk times tried for the optimum

_TEXT = """Written by `python -m bench.long_prompt_report`. {about}
Simulated on latency profiles measured on these GPUs, {tokens} prompt tokens,
`max_num_batched_tokens` {default}, default settings otherwise.

Versions: {made}.

TTFT in seconds; in brackets the number of chunks.

{details}
The best of each row above. `work`: the last stage's own in the cheapest of the fixed chunkings, as
if it never waited: no chunking can be faster. `optimum`: on like stages chunks of times t_i take
sum(t_i) + (P - 1) max(t_i), so for each longest time the largest chunks that keep it are best; the
best of those, with the stage times known exactly, embedding and head left out, and chunks in
multiples of {align}: the most that any rule could win. The other percentages are of
`equal latency`, measured.

{summary}"""


@dataclass(frozen=True, slots=True)
class Alone:
    """One run: TTFT, the last stage's own work, both in seconds, and the number of chunks."""

    ttft_s: float
    work_s: float
    chunks: int


def run_alone(profile: str, pp_size: int, chunk: dict[str, Any], tokens: int) -> Alone:
    """Serve one prompt of `tokens` with the chunk settings `chunk`."""
    with tempfile.TemporaryDirectory() as folder:  # each measures the stages itself
        spec = _spec(profile, pp_size, chunk, Path(folder))
        outcome = simulate(spec, requests=[BenchRequest("long", IDLE_S, tokens, 1)])
    return Alone(outcome.result["measures"]["ttft_s"]["mean"], *_work(outcome))


def _spec(profile: str, pp_size: int, chunk: dict[str, Any], folder: Path) -> SimSpec:
    settings = {
        "chunk": chunk,
        "rebalance": {"strategy": "off"},
        "profiling": {"directory": str(folder)},
    }
    return SimSpec.parse(
        {
            "workload": {"name": "long_context", "num_prompts": 1, "rate": 1.0},
            "policy": {"name": str(chunk), "scheduler": "ours", "settings": settings},
            "pp_size": pp_size,
            "profile": profile,
            "max_num_batched_tokens": DEFAULT,
        }
    )


def _work(outcome: Outcome) -> tuple[float, int]:
    own = [[b for b in stage if b.start_s >= IDLE_S] for stage in outcome.stages]
    return sum(b.end_s - b.start_s for b in own[-1]), len(own[-1])


@dataclass(frozen=True, slots=True)
class Case:
    """All runs of a profile on a number of stages, by chunk and by first chunk in tokens."""

    profile: str
    pp_size: int
    fixed: dict[int, Alone]
    equal: dict[int, Alone]
    optimum_s: float


def measure(profile: str, pp_size: int, tokens: int) -> Case:
    """Every chunk and every first chunk."""
    fixed, equal = {}, {}
    for chunk in CHUNKS:
        settings = {"strategy": "fixed", "fixed_tokens": chunk}
        fixed[chunk] = run_alone(profile, pp_size, settings, tokens)
        settings = {"strategy": "equal_latency", "equal_first_chunk": chunk}
        equal[chunk] = run_alone(profile, pp_size, settings, tokens)
    return Case(profile, pp_size, fixed, equal, optimum(profile, pp_size, tokens))


def optimum(profile: str, pp_size: int, tokens: int) -> float:
    """Least seconds of any chunking on `pp_size` stages, embedding and head left out."""
    spec = _spec(profile, pp_size, {}, Path())
    stage, chunks = middle_stage(spec), range(ALIGN, DEFAULT + 1, ALIGN)
    shortest, longest = stage(ALIGN, tokens), stage(DEFAULT, tokens)
    limits = [shortest * (longest / shortest) ** (i / LIMITS) for i in range(1, LIMITS + 1)]
    return min(_greedy(stage, chunks, limit_s, tokens, pp_size) for limit_s in limits)


def middle_stage(spec: SimSpec) -> Callable[[int, int], float]:
    """Seconds of a stage between the ends, for (new tokens, tokens before them).

    The chunk comes right after one of its own size.
    """
    seconds, layers = profile_of(spec.profile).compiled, min(spec.layers)

    def alone(shape: BatchShape) -> float:
        return seconds(shape, layers, False, False)

    timed = alone if spec.overhead is None else spec.overhead.wrap(alone, layers)

    def stage(new: int, before: int) -> float:
        shape = BatchShape(((new, before),))
        timed(shape)  # the overhead depends on the micro-batch before
        return timed(shape)

    return stage


def _greedy(
    stage: Callable[[int, int], float],
    chunks: Sequence[int],
    limit_s: float,
    tokens: int,
    pp_size: int,
) -> float:
    """Seconds with the largest chunks of at most `limit_s` each."""
    done, times = 0, list[float]()
    while done < tokens:
        # Stage times rise with the chunk but for a few tokens, so bisection finds the largest.
        fits = bisect_right(chunks, limit_s, key=lambda new: stage(new, done))
        new = min(chunks[max(fits - 1, 0)], tokens - done)
        times.append(stage(new, done))
        done += new
    return sum(times) + (pp_size - 1) * max(times)


def details(cases: Sequence[Case]) -> str:
    """TTFT by chunk; one row a rule."""
    names = " | ".join(str(chunk) for chunk in CHUNKS)
    lines = [f"| profile, stages | first chunk | {names} |", "|---|---|" + "---|" * len(CHUNKS)]
    for case in cases:
        for rule, runs in (("fixed", case.fixed), ("equal latency", case.equal)):
            cells = " | ".join(f"{runs[c].ttft_s:.2f} ({runs[c].chunks})" for c in CHUNKS)
            lines.append(f"| {case.profile}, PP={case.pp_size} | {rule} | {cells} |")
    return "\n".join(lines) + "\n"


def summary(cases: Sequence[Case]) -> str:
    """What equal latency wins against which baseline, and what could be won at all."""
    lines = [
        "| profile, stages | work s | optimum s | best fixed s | optimum against it "
        "| equal latency s | against best fixed | against fixed, same first chunk "
        "| 8192 first, against fixed 8192 |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for case in cases:
        fixed = min(CHUNKS, key=lambda c: case.fixed[c].ttft_s)
        equal = min(CHUNKS, key=lambda c: case.equal[c].ttft_s)
        best_s, found_s = case.fixed[fixed].ttft_s, case.equal[equal].ttft_s
        against = [
            found_s / best_s,
            found_s / case.fixed[equal].ttft_s,
            case.equal[DEFAULT].ttft_s / case.fixed[DEFAULT].ttft_s,
        ]
        cells = [
            f"{case.profile}, PP={case.pp_size}",
            f"{min(run.work_s for run in case.fixed.values()):.2f}",
            f"{case.optimum_s:.2f}",
            f"{best_s:.2f} ({fixed})",
            f"{case.optimum_s / best_s - 1.0:+.1%}",
            f"{found_s:.2f} ({equal})",
            *(f"{ratio - 1.0:+.1%}" for ratio in against),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.long_prompt_report", description=__doc__)
    parser.add_argument("out", type=Path, help="Markdown file to write")
    parser.add_argument("--tokens", type=int, default=131_072, help="of the prompt")
    parser.add_argument("--stages", type=int, nargs="*", default=STAGES)
    parser.add_argument("--profiles", nargs="*", default=PROFILES)
    args = parser.parse_args(argv)
    _quiet()
    cases = [measure(name, size, args.tokens) for name in args.profiles for size in args.stages]
    made = ", ".join(f"{name} {version}" for name, version in versions().items())
    text = _TEXT.format(
        about=(__doc__ or "").partition("\n\n")[2].strip(),
        tokens=args.tokens,
        default=DEFAULT,
        align=ALIGN,
        made=made,
        details=details(cases),
        summary=summary(cases),
    )
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(text, encoding="utf-8")
    print(text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
