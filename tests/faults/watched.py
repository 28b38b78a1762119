"""What a server's page says while requests run."""

import threading
import time

from tests.faults.servers import value


class Watched:
    """Preemptions as they happen, and whether parts of the plugin are replaced; on a thread."""

    def __init__(self, server, every_s):
        self.server, self.every_s = server, every_s
        self.rows = []  # seconds, preemptions so far, parts of the plugin that are replaced
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def _watch(self):
        while not self._end.wait(self.every_s):
            self.look()

    def look(self):
        names = ("vllm:num_preemptions_total", "ppbalance_fallback")
        self.rows.append((time.monotonic(), *(value(self.server, name) for name in names)))

    def __enter__(self):
        self.look()
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._end.set()
        self._thread.join(30.0)
        self.look()

    @property
    def preemptions(self):
        return int(self.rows[-1][1] - self.rows[0][1])

    @property
    def preempting_s(self):
        """From the first of them to the last."""
        pairs = zip(self.rows, self.rows[1:], strict=False)
        at_s = [after[0] for before, after in pairs if after[1] > before[1]]
        return at_s[-1] - at_s[0] if at_s else 0.0

    @property
    def replaced(self):
        return max(row[2] for row in self.rows)
