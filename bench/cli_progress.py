"""A progress bar over runs, on the error stream."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from bench.parallel import Done
from bench.sim_spec import SimSpec


@contextmanager
def track(title: str, total: int) -> Iterator[Done]:
    """Yields what to call after each run."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True)) as bar:
        task = bar.add_task(title, total=total)

        def done(spec: SimSpec, _record: dict[str, Any]) -> None:
            text = f"{title}: {spec.policy.name} on {spec.workload.name}"
            bar.update(task, advance=1, description=text)

        yield done
