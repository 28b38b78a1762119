"""Many runs at once: a process pool on this machine, or tasks on a Ray cluster; resumable."""

import json
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from bench.sim_spec import SimSpec

Done = Callable[[SimSpec, dict[str, Any]], None]


def result_path(out: Path, spec: SimSpec) -> Path:
    """Where the run's record lies: named by the hash of its settings."""
    return out / f"{spec.key}.json"


def load_result(path: Path) -> dict[str, Any] | None:
    """A finished run's record, None where there is none or it is not whole."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError):
        return None
    return record if isinstance(record, dict) and "measures" in record else None


def run_all(
    specs: Sequence[SimSpec],
    out: Path,
    *,
    data: Path | None = None,
    workers: int | None = None,
    ray_address: str | None = None,
    done: Done | None = None,
) -> list[dict[str, Any]]:
    """The records of all runs, in the order of `specs`; what lies in `out` is not run again.

    `workers` defaults to all cores; `ray_address` ("auto" for a running cluster) sends the runs to
    Ray instead: its nodes need this package and the trace files at the same paths. A run that
    fails is reported after the others are through, as RuntimeError.
    """
    records: dict[str, dict[str, Any]] = {}
    left: dict[str, SimSpec] = {}
    for spec in specs:
        record = load_result(result_path(out, spec))
        if record is None:
            left.setdefault(spec.key, spec)
        elif spec.key not in records:
            records[spec.key] = record
            if done is not None:
                done(spec, record)
    failed: list[str] = []
    start = _on_ray if ray_address else _in_processes
    for spec, record, error in start(list(left.values()), out, data, ray_address or workers):
        if record is None:
            failed.append(f"{spec.policy.name} on {spec.workload.name} ({spec.key}): {error}")
            continue
        records[spec.key] = record
        if done is not None:
            done(spec, record)
    if failed:
        raise RuntimeError(f"{len(failed)} of {len(left)} runs failed:\n" + "\n".join(failed))
    return [records[spec.key] for spec in specs]


def run_one(fields: dict[str, Any], out: str, data: str | None) -> str:
    """One run in a process of its own: spec fields in, record written, its text returned."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    from bench.simulate import simulate

    spec = SimSpec.parse(fields)
    outcome = simulate(spec, Path(data) if data else None)
    outcome.write(result_path(Path(out), spec))
    return outcome.to_json()


_Result = tuple[SimSpec, dict[str, Any] | None, str]


def _in_processes(
    specs: Sequence[SimSpec], out: Path, data: Path | None, workers: Any
) -> Iterator[_Result]:
    if not specs:
        return
    count = min(workers or os.cpu_count() or 1, len(specs))
    # Spawned: forking after vLLM's threads have started is not safe.
    with ProcessPoolExecutor(count, mp_context=get_context("spawn")) as pool:
        where = str(data) if data else None
        futures = {pool.submit(run_one, spec.as_json(), str(out), where): spec for spec in specs}
        for future in as_completed(futures):
            spec, error = futures[future], future.exception()
            if error is not None:
                yield spec, None, f"{type(error).__name__}: {error}"
            else:
                yield spec, json.loads(future.result()), ""


def _on_ray(
    specs: Sequence[SimSpec], out: Path, data: Path | None, address: Any
) -> Iterator[_Result]:
    try:
        import ray
    except ImportError:
        raise RuntimeError("--ray needs the package ray: pip install 'ray>=2.40'") from None
    if not specs:
        return
    ray.init(address=None if address == "local" else address, log_to_driver=False)
    try:
        task = ray.remote(num_cpus=1)(run_one)
        where, scratch = (str(data.resolve()) if data else None), str(out.resolve())
        pending = {task.remote(spec.as_json(), scratch, where): spec for spec in specs}
        while pending:
            ready, _ = ray.wait(list(pending), num_returns=1)
            spec = pending.pop(ready[0])
            try:
                text = ray.get(ready[0])
            except ray.exceptions.RayError as error:
                yield spec, None, str(error).strip().splitlines()[-1]
                continue
            # The node that ran it may not share this disk.
            path = result_path(out, spec)
            if not path.exists():
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text, encoding="utf-8")
            yield spec, json.loads(text), ""
    finally:
        ray.shutdown()
