"""A stand-in for an OpenAI server: answers what `bench serve` asks it itself, and notes it."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Stub:
    """Its answers, by "METHOD /path": (status, body); what is not there is a 404."""

    def __init__(self) -> None:
        self.answers: dict[str, tuple[int, object]] = {
            "GET /v1/models": (200, {"data": [{"id": "m", "max_model_len": 512}]}),
            "GET /version": (200, {"version": "0.32.0"}),
            "POST /reset_prefix_cache": (200, {"success": True}),
        }
        self.asked: list[str] = []
        self.url = ""


@contextmanager
def openai_stub() -> Iterator[Stub]:
    stub = Stub()

    class Handler(BaseHTTPRequestHandler):
        def _answer(self) -> None:
            asked = f"{self.command} {self.path}"
            stub.asked.append(asked)
            status, body = stub.answers.get(asked, (404, {}))
            text = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        do_GET = do_POST = _answer

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    stub.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield stub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
