"""The terminal view, from pages as a server shows them."""

import os
import pty
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

pytest.importorskip("prometheus_client")
pytest.importorskip("rich")

from prometheus_client import CollectorRegistry, Histogram, generate_latest

from bench.live_server import free_port
from vllm_ppbalance.__main__ import main
from vllm_ppbalance.metrics_page import MetricsPage
from vllm_ppbalance.top import TTFT, read_page, rows

ROOT = Path(__file__).parent.parent
FIRST = {
    "steps": {"": 100.0},
    "token_budget": {"": 384.0},
    "slo_ttft_seconds": {"": 2.0},
    "slo_tpot_seconds": {"": 0.2},
    "cohort_decodes": {"0": 12.0, "1": 9.0},
    "bubble_seconds": {
        "prefill_prefill": 1.0,
        "prefill_decode": 2.0,
        "decode_decode": 0.0,
        "starved": 1.0,
    },
    "work_seconds": {"": 40.0},
    "stage_samples": {"": 10.0},
    "stage_measured_seconds": {"": 0.2},
    "fallback": {"stock": 0.0, "fixed_budget": 1.0},
}


class Server:
    """A page that can be changed."""

    def __init__(self):
        self.registry = CollectorRegistry()
        self.page = MetricsPage(self.registry)
        labels = ("model_name", "engine")
        self.ttft = Histogram(TTFT, "as vLLM's", labels, registry=self.registry)
        registry = self.registry

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                self.send_response(200)
                self.end_headers()
                self.wfile.write(generate_latest(registry))

            def log_message(self, *args):
                pass

        self.http = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}"
        threading.Thread(target=self.http.serve_forever, daemon=True).start()

    def close(self):
        self.http.shutdown()
        self.http.server_close()


@pytest.fixture
def server():
    server = Server()
    yield server
    server.close()


def test_a_row_a_cohort_and_what_matters_below(server, capsys):
    server.page.update("m", "0", FIRST)
    server.ttft.labels("m", "0").observe(0.25)
    assert main(["top", "--url", server.url, "--once"]) == 0
    shown = capsys.readouterr().out
    lines = [line.split() for line in shown.splitlines()]
    assert ["0", "12", "█" * 30] in lines
    assert ["1", "9", "█" * 22] in lines
    assert "384 tokens" in shown
    assert "250.0 ms of 2000.0 ms" in shown
    assert "10.0% (prefill-prefill 2.5%, prefill-decode 5.0%" in shown
    assert "20.0 ms measured, - predicted" in shown
    assert "fixed_budget" in shown


def test_means_are_of_the_time_between_two_looks(server):
    server.page.update("m", "0", FIRST)
    before = read_page(server.url)
    idle = dict.fromkeys(FIRST["bubble_seconds"], 0.0) | {"starved": 1.0}
    server.page.update("m", "0", {"bubble_seconds": idle, "work_seconds": {"": 4.0}})
    server.ttft.labels("m", "0").observe(3.0)
    shown = dict(rows(read_page(server.url + "/metrics"), before, "0"))
    assert shown["bubbles"].startswith("25.0%")
    assert shown["TTFT"] == "3000.0 ms over 2000.0 ms"


def test_each_engine_has_its_own(server, capsys):
    for engine in ("10", "2"):
        server.page.update("m", engine, FIRST)
    assert main(["top", "--url", server.url, "--once"]) == 0
    shown = capsys.readouterr().out
    assert shown.index("engine 2") < shown.index("engine 10")


def test_a_server_without_the_series_is_told(server, capsys):
    assert main(["top", "--url", server.url, "--once"]) == 0
    assert "PPBALANCE=1" in capsys.readouterr().out


def test_no_server_is_one_clear_line(capsys):
    port = free_port()
    assert main(["top", "--url", f"http://127.0.0.1:{port}", "--once"]) == 1
    shown = capsys.readouterr().out
    assert f"no metrics from http://127.0.0.1:{port}/metrics" in shown
    assert shown.count("\n") == 1


def test_a_url_that_is_none_is_one_clear_line(capsys):
    assert main(["top", "--url", "localhost", "--once"]) == 1
    assert "no metrics from localhost/metrics" in capsys.readouterr().out


def test_without_rich_it_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "rich.console", None)
    assert main(["top", "--once"]) == 1
    assert "needs rich.console: pip install rich" in capsys.readouterr().out


def watching(url):
    """`top` in a terminal of its own: the process and the terminal's file."""
    terminal, other = pty.openpty()
    command = [sys.executable, "-m", "vllm_ppbalance", "top", "--url", url, "--every", "0.2"]
    process = subprocess.Popen(
        command, stdin=other, stdout=other, stderr=other, cwd=ROOT, start_new_session=True
    )
    os.close(other)
    return process, terminal


def read_until(terminal, words, limit_s=30.0):
    text, deadline = "", time.monotonic() + limit_s
    while words not in text and time.monotonic() < deadline:
        try:
            text += os.read(terminal, 65536).decode(errors="replace")
        except OSError:  # the other end is closed
            break
    return text


@pytest.mark.parametrize("end", ["ctrl-c", "server gone"])
def test_it_ends_in_order(server, end):
    server.page.update("m", "0", FIRST)
    process, terminal = watching(server.url)
    try:
        assert "384 tokens" in read_until(terminal, "384 tokens")
        if end == "ctrl-c":
            process.send_signal(signal.SIGINT)
        else:
            server.close()
        rest = read_until(terminal, "\0")
        assert process.wait(10) == (0 if end == "ctrl-c" else 1)
        assert "Traceback" not in rest
        assert ("no metrics from" in rest) == (end == "server gone")
    finally:
        process.kill()
        process.wait()
        os.close(terminal)
