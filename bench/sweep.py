"""Policies x workloads x rates: the specs of a sweep, and its results as a table."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.cli_options import make_spec, read_yaml
from bench.sim_spec import SimSpec

PRESETS = Path(__file__).resolve().parent.parent / "configs" / "sweeps"
_CAUSES = ("prefill_prefill", "prefill_decode", "decode_decode", "starved")
_FIELDS = ("title", "base", "policies", "judged", "workloads", "rates")


@dataclass(frozen=True, slots=True)
class Case:
    """One run of a sweep, with the workload's name in the table."""

    label: str
    spec: SimSpec


@dataclass(frozen=True, slots=True)
class Sweep:
    """A title and the runs, workload by workload."""

    title: str
    cases: tuple[Case, ...]
    judged: tuple[str, ...] = ()  # policies that are compared with the best of the others


def load_sweep(name: str, *, files: bool = True) -> Sweep:
    """A sweep from a YAML file, or from a preset by its name.

    Its fields are title, base (fields of every run), policies, judged (names of policies to compare
    with the best of the others), workloads (label, workload, and fields that override base), and
    rates, each of which every workload then gets. Without `files` trace files are replaced by the
    committed models of their lengths. Raises ValueError.
    """
    path = Path(name)
    if path.suffix not in (".yaml", ".yml"):
        path = PRESETS / f"{name}.yaml"
        if not path.is_file():
            known = ", ".join(sorted(p.stem for p in PRESETS.glob("*.yaml")))
            raise ValueError(f"sweep {name!r} is unknown; there are: {known}, or give a YAML file")
    fields = read_yaml(path)
    for field in fields:
        if field not in _FIELDS:
            raise ValueError(f"{path}: {field!r} is unknown; there are: {', '.join(_FIELDS)}")
    try:
        return make_sweep(fields, files=files)
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path}: misses or mistakes {error}") from None


def make_sweep(fields: Mapping[str, Any], *, files: bool = True) -> Sweep:
    """The runs of a sweep's plain fields."""
    cases = []
    for entry in fields["workloads"]:
        own = {name: value for name, value in entry.items() if name != "label"}
        workload = dict(own["workload"])
        if not files:
            workload.pop("path", None)
        label = str(entry.get("label", workload["name"]))
        for rate in fields.get("rates") or [None]:
            sent = workload if rate is None else at_rate(workload, float(rate))
            shown = label if rate is None else f"{label}, {rate:g} req/s"
            run = {**fields.get("base", {}), **own, "workload": sent}
            cases += [Case(shown, make_spec(run, policy)) for policy in fields["policies"]]
    judged = tuple(map(str, fields.get("judged", ())))
    return Sweep(str(fields.get("title", "Sweep")), tuple(cases), judged)


def at_rate(workload: Mapping[str, Any], rate: float) -> dict[str, Any]:
    """The workload sent at `rate` requests a second; a trace's own times give way to Poisson."""
    arrival = workload.get("arrival")
    if arrival in (None, "trace"):
        arrival = "poisson"
    return {**workload, "arrival": arrival, "rate": rate, "speed": 1.0}


def markdown_table(cases: Sequence[Case], results: Sequence[Mapping[str, Any]]) -> str:
    """One row a run; the best attainment of each workload in bold."""
    best: dict[str, float] = {}
    for case, result in zip(cases, results, strict=True):
        attained = float(result["measures"]["slo_attainment"])
        best[case.label] = max(best.get(case.label, 0.0), attained)
    lines = [
        "| workload | policy | SLO attainment | P90 TTFT s | P90 TPOT s | total tok/s | bubble "
        "| P-P | P-D | D-D | starved |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for case, result in zip(cases, results, strict=True):
        measures, pipeline = result["measures"], result["pipeline"]
        shown = f"{measures['slo_attainment']:.3f}"
        if measures["slo_attainment"] >= best[case.label]:
            shown = f"**{shown}**"
        cells = [case.label, case.spec.policy.name, shown, *_numbers(measures)]
        cells.append(f"{pipeline['bubble_ratio']:.3f}")
        cells += [f"{pipeline['bubble_ratio_by_cause'][cause]:.3f}" for cause in _CAUSES]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def margins(cases: Sequence[Case], results: Sequence[Mapping[str, Any]], policy: str) -> str:
    """Attainment of `policy` beside the best of the others, a row a workload; losses say so."""
    attained: dict[str, dict[str, float]] = {}
    for case, result in zip(cases, results, strict=True):
        row = attained.setdefault(case.label, {})
        row[case.spec.policy.name] = float(result["measures"]["slo_attainment"])
    lines = [
        f"| workload | {policy} | best of the others | difference, points |",
        "|---|---:|---|---:|",
    ]
    for label, row in attained.items():
        # A policy's variants ("balanced in order of arrival") are not its rivals.
        others = {
            name: value for name, value in row.items() if name.split()[0] != policy.split()[0]
        }
        best = max(others, key=lambda name: others[name])
        points = 100.0 * (row[policy] - others[best])
        shown = f"{points:+.1f}" if points > -0.05 else f"**{points:+.1f} (loss)**"
        lines.append(f"| {label} | {row[policy]:.3f} | {others[best]:.3f} ({best}) | {shown} |")
    return "\n".join(lines)


_SETUP: tuple[str, ...] = (
    *("profile", "link", "pp_size", "stage_layers", "kv_cache_gib", "max_num_seqs", "mode"),
    *("prefix_caching", "noise", "cold_start", "predictor_scale"),
)


def _unlike(spec: SimSpec, common: SimSpec) -> str:
    """The fields in which a run's set-up differs from the page's."""
    pairs = {name: getattr(spec, name) for name in _SETUP}
    return ", ".join(f"{k} {v}" for k, v in pairs.items() if v != getattr(common, k))


def _numbers(measures: Mapping[str, Any]) -> list[str]:
    if not measures["num_requests"]:
        return ["-", "-", "-"]
    return [
        f"{measures['ttft_s']['p90']:.3f}",
        f"{measures['tpot_s']['p90']:.4f}" if measures["tpot_s"]["p90"] is not None else "-",
        f"{measures['total_tok_per_s']:.0f}",
    ]


def report(sweep: Sweep, results: Sequence[Mapping[str, Any]], command: str, *, source: str) -> str:
    """A Markdown page: what was run, with what, and the table."""
    spec, versions = sweep.cases[0].spec, dict(results[0]["versions"])
    versions["commit"] = ", ".join(sorted({str(r["versions"].get("commit")) for r in results}))
    seeds = sorted({case.spec.workload.seed for case in sweep.cases})
    slos = {case.label: case.spec.slo for case in sweep.cases}
    lines = [
        f"# {sweep.title}",
        "",
        f"Generated by `{command}`; do not edit.",
        "",
        f"- Simulated in virtual time; latency profile `{spec.profile}` ({source}), overhead of "
        f"real pipelines {'included' if spec.overhead else 'not included'}.",
        f"- {spec.pp_size} stages of {', '.join(map(str, spec.layers))} layers, link {spec.link}, "
        f"{spec.mode} scheduling, max_num_seqs {spec.max_num_seqs}, max_num_batched_tokens "
        f"{spec.max_num_batched_tokens}, {spec.kv_cache_gib:g} GiB of KV cache a GPU.",
        "- Versions: " + ", ".join(f"{k} {v}" for k, v in versions.items()) + ".",
        f"- Seeds: runs {spec.seed}, workloads {', '.join(map(str, seeds))}.",
        "",
        "| workload | requests | req/s | SLO TTFT s | SLO TPOT s | other than above | SHA-256 |",
        "|---|---:|---:|---:|---:|---|---|",
    ]
    seen: dict[str, tuple[Mapping[str, Any], str]] = {}
    for case, result in zip(sweep.cases, results, strict=True):
        seen.setdefault(case.label, (result["workload"], _unlike(case.spec, spec)))
    for label, (workload, unlike) in seen.items():
        rate = workload["num_requests"] / workload["span_s"]
        lines.append(
            f"| {label} | {workload['num_requests']} | {rate:.2f} | {slos[label].ttft_s:g} "
            f"| {slos[label].tpot_s:g} | {unlike} | `{workload['sha256'][:12]}` |"
        )
    for name in sweep.judged:
        lines += ["", margins(sweep.cases, results, name)]
    return "\n".join([*lines, "", markdown_table(sweep.cases, results), ""])
