"""What a server's page says while requests run."""

import threading
import time
from typing import NamedTuple

from tests.faults.servers import value


class Look(NamedTuple):
    """Preemptions so far, and whether all of the plugin or its chunk policy is replaced."""

    at_s: float
    preemptions: float
    stock: float
    fixed_budget: float


class Watched:
    """Looks at the page again and again, on a thread."""

    def __init__(self, server, every_s):
        self.server, self.every_s = server, every_s
        self.looks = []
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def _watch(self):
        while not self._end.wait(self.every_s):
            self._look()

    def _look(self):
        preemptions = value(self.server, "vllm:num_preemptions_total")
        kinds = ("stock", "fixed_budget")
        replaced = (value(self.server, "ppbalance_fallback", kind=kind) for kind in kinds)
        self.looks.append(Look(time.monotonic(), preemptions, *replaced))

    def __enter__(self):
        self._look()
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._end.set()
        self._thread.join(30.0)
        self._look()

    @property
    def preemptions(self):
        return int(self.looks[-1].preemptions - self.looks[0].preemptions)

    @property
    def preempting_s(self):
        """From the first of them to the last."""
        pairs = zip(self.looks, self.looks[1:], strict=False)
        at_s = [b.at_s for a, b in pairs if b.preemptions > a.preemptions]
        return at_s[-1] - at_s[0] if at_s else 0.0

    @property
    def ever_stock(self):
        return any(look.stock for look in self.looks)

    @property
    def share_predicting(self):
        """Of the looks, those at which the chunk policy had predictions to go by."""
        return sum(not look.fixed_budget for look in self.looks) / len(self.looks)
