"""`python -m vllm_ppbalance top`: a live view of a server, from its own `/metrics` page."""

from __future__ import annotations

import signal
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from vllm_ppbalance.bubble_estimate import CAUSES
from vllm_ppbalance.metrics import PREFIX, bubble_ratios

TIMEOUT_S = 5.0
TTFT = "vllm:time_to_first_token_seconds"
TPOT = "vllm:request_time_per_output_token_seconds"
ENGINE = "engine"

Labels = tuple[tuple[str, str], ...]


class PageError(RuntimeError):
    """The page cannot be read, or shows nothing of ours; one line for the user."""


@dataclass(frozen=True, slots=True)
class Page:
    """One scrape: values by name and labels."""

    at_s: float  # monotonic clock
    samples: Mapping[tuple[str, Labels], float]

    def value(self, name: str, **labels: str) -> float:
        """Sum of the samples of `name` that carry these labels; 0 without any."""
        return sum(self.by(name, "", **labels).values())

    def by(self, name: str, label: str, **labels: str) -> dict[str, float]:
        """The samples of `name` that carry these labels, summed by one more label."""
        wanted = labels.items()
        found: dict[str, float] = {}
        for (sample, has), value in self.samples.items():
            if sample == name and wanted <= dict(has).items():
                key = dict(has).get(label, "")
                found[key] = found.get(key, 0.0) + value
        return found

    def engines(self) -> list[str]:
        """The engines that show our series, in order."""
        return sorted(self.by(f"{PREFIX}steps_total", ENGINE), key=lambda name: (len(name), name))


def read_page(url: str) -> Page:
    """Scrape `url`, a server's address or its page. Raises PageError."""
    from prometheus_client.parser import text_string_to_metric_families

    page = url if url.rstrip("/").endswith("/metrics") else f"{url.rstrip('/')}/metrics"
    try:
        with urllib.request.urlopen(page, timeout=TIMEOUT_S) as answer:
            text = answer.read().decode("utf-8", "replace")
        samples = {
            (sample.name, tuple(sorted(sample.labels.items()))): float(sample.value)
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name.startswith((PREFIX, TTFT, TPOT))
        }
    except (urllib.error.URLError, OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        raise PageError(f"no metrics from {page}: {reason}") from None
    return Page(time.monotonic(), samples)


def view(page: Page, before: Page | None) -> Any:
    """The tables of all engines; rates and means are of the time since `before`."""
    from rich.console import Group

    if not page.engines():
        return (
            "No ppbalance_* series yet: they come with the first request, on a server that runs "
            "with PPBALANCE=1 and pipeline parallelism."
        )
    return Group(*(_engine(page, before, engine) for engine in page.engines()))


def _engine(page: Page, before: Page | None, engine: str) -> Any:
    from rich.console import Group
    from rich.table import Table

    cohorts = page.by(f"{PREFIX}cohort_decodes", "cohort", engine=engine)
    widest = max(cohorts.values(), default=0.0)
    table = Table(title=f"engine {engine}", title_justify="left", box=None, padding=(0, 2))
    table.add_column("cohort")
    table.add_column("decodes", justify="right")
    table.add_column("")
    for cohort, decodes in sorted(cohorts.items(), key=lambda item: int(item[0])):
        bar = "█" * round(30 * decodes / widest) if widest else ""
        table.add_row(cohort, f"{decodes:.0f}", bar)
    facts = Table(box=None, show_header=False, padding=(0, 2))
    for name, value in rows(page, before, engine):
        facts.add_row(name, value)
    return Group(table, facts)


def rows(page: Page, before: Page | None, engine: str) -> Iterable[tuple[str, str]]:
    """What is printed under an engine's cohorts: (name, value)."""

    def gauge(name: str) -> float:
        return page.value(PREFIX + name, engine=engine)

    def grown(name: str, **labels: str) -> float:
        earlier = before.value(name, engine=engine, **labels) if before is not None else 0.0
        value = page.value(name, engine=engine, **labels)
        return value - earlier if value >= earlier else value  # the server was restarted

    def mean(total: str, count: str) -> float | None:
        return grown(total) / number if (number := grown(count)) > 0.0 else None

    seconds = page.at_s - before.at_s if before is not None else 0.0
    idle = {c: grown(f"{PREFIX}bubble_seconds_total", cause=c) for c in CAUSES}
    bubbles = bubble_ratios(idle, grown(f"{PREFIX}work_seconds_total"))
    steps = grown(f"{PREFIX}steps_total")
    yield "budget", f"{gauge('token_budget'):.0f} tokens"
    yield "TTFT", _against(mean(f"{TTFT}_sum", f"{TTFT}_count"), gauge("slo_ttft_seconds"))
    yield "TPOT", _against(mean(f"{TPOT}_sum", f"{TPOT}_count"), gauge("slo_tpot_seconds"))
    shares = ", ".join(f"{c.replace('_', '-')} {share:.1%}" for c, share in bubbles.items())
    yield "bubbles", f"{sum(bubbles.values()):.1%} ({shares})" if bubbles else "-"
    measured = mean(f"{PREFIX}stage_measured_seconds_total", f"{PREFIX}stage_samples_total")
    predicted = mean(f"{PREFIX}stage_predicted_seconds_total", f"{PREFIX}predicted_samples_total")
    yield "stage time", f"{_ms(measured)} measured, {_ms(predicted)} predicted"
    yield "holds", f"{grown(f'{PREFIX}moves_total'):.0f} new, {gauge('held_decodes'):.0f} now"
    yield "waiting", f"{gauge('waiting_prompt_tokens'):.0f} prompt tokens"
    yield "KV free", f"{gauge('kv_free_ratio'):.0%}"
    if seconds > 0.0:
        yield "steps", f"{steps / seconds:.0f}/s"
    states = page.by(f"{PREFIX}fallback", "kind", engine=engine)
    yield "fallback", ", ".join(kind for kind, on in states.items() if on) or "none"


def _against(seconds: float | None, target_s: float) -> str:
    if seconds is None:
        return f"- (target {_ms(target_s)})"
    word = "over" if seconds > target_s else "of"
    return f"{_ms(seconds)} {word} {_ms(target_s)}"


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1e3 * seconds:.1f} ms"


def top(url: str, every_s: float, once: bool, say: Callable[[str], None] = print) -> int:
    """Show the server at `url` until Ctrl-C; 0, or 1 when it cannot be read (any more)."""
    try:
        import prometheus_client  # noqa: F401 - read_page needs it
        from rich.console import Console
        from rich.live import Live
    except ImportError as error:
        say(f"ppbalance: top needs {error.name}: pip install rich prometheus_client")
        return 1
    console = Console()
    # A shell that starts it in the background leaves Ctrl-C ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        page = read_page(url)
        if once:
            console.print(view(page, None))
            return 0
        with Live(view(page, None), console=console, auto_refresh=False) as live:
            while True:
                time.sleep(every_s)
                page, before = read_page(url), page
                live.update(view(page, before), refresh=True)
    except PageError as error:
        say(f"ppbalance: {error}")
        return 1
    except KeyboardInterrupt:
        return 0
