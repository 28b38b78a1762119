"""Cost models on disk: one JSON file a deployment, written atomically, refused with a reason."""

import hashlib
import json
import logging
import os
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vllm_ppbalance.config import PredictorSettings
from vllm_ppbalance.cost_model import PUBLISHED, CostModel

logger = logging.getLogger("vllm.ppbalance")

FORMAT = 1
SAVE_EVERY_S = 10.0  # vLLM kills its engine soon after SIGTERM: no more than this is lost
DAY_S = 86_400.0


class ProfileRefusedError(ValueError):
    """A saved profile cannot be used; the message says why."""


def default_directory(environ: Mapping[str, str]) -> Path:
    """The user's cache directory for profiles; without a known home where vLLM's cache is, too."""
    base = environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(base) / "vllm_ppbalance"


class ProfileStore:
    """The saved model of one deployment (model, GPU, stages, versions: plain values by name).

    `settings` are for what a loaded model learns from then on.
    """

    def __init__(
        self,
        directory: Path,
        deployment: Mapping[str, Any],
        settings: PredictorSettings = PUBLISHED,
    ) -> None:
        self._settings = settings
        self.deployment = dict(deployment)
        text = json.dumps(self.deployment, sort_keys=True)
        name = str(self.deployment.get("model", "model")).rstrip("/").rsplit("/", 1)[-1]
        digest = hashlib.sha256(text.encode()).hexdigest()[:12]
        self.path = directory / f"{name}-{digest}.json"

    def load(self, max_age_s: float, now_s: float | None = None) -> CostModel:
        """The saved model. Raises ProfileRefusedError: absent, corrupt, foreign, or stale."""
        try:
            saved = json.loads(self.path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise ProfileRefusedError("there is none yet") from None
        except (OSError, ValueError, RecursionError) as error:
            raise ProfileRefusedError(f"it cannot be read: {error}") from None
        if not isinstance(saved, dict) or saved.get("format") != FORMAT:
            raise ProfileRefusedError(f"its format is not {FORMAT}")
        theirs, saved_at = saved.get("deployment"), saved.get("saved_at")
        if not isinstance(theirs, dict) or not isinstance(saved_at, int | float):
            raise ProfileRefusedError("it does not say of which deployment, or when")
        foreign = [
            f"{name} is {theirs.get(name)!r}, here it is {value!r}"
            for name, value in self.deployment.items()
            if theirs.get(name) != value
        ]
        if foreign:
            raise ProfileRefusedError("it is of another deployment: " + "; ".join(foreign))
        try:
            age_s = (time.time() if now_s is None else now_s) - saved_at
            model = CostModel.from_dict(saved.get("model", {}), self._settings)
        except (ArithmeticError, ValueError) as error:
            raise ProfileRefusedError(str(error)) from None
        if not age_s <= max_age_s:  # a time that is not a number is refused too
            raise ProfileRefusedError(f"it is {age_s / DAY_S:.0f} days old")
        return model

    def save(self, model: Mapping[str, Any], now_s: float | None = None) -> None:
        """Write a model's `to_dict()`; readers see the old file or the new one, never a part.

        Raises OSError.
        """
        saved = {
            "format": FORMAT,
            "saved_at": time.time() if now_s is None else now_s,
            "deployment": self.deployment,
            "model": dict(model),
        }
        self.path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=self.path.parent, prefix=".profile-")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                json.dump(saved, file, indent=1)
                file.flush()
                os.fsync(file.fileno())
            os.replace(name, self.path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise


class Saver:
    """Writes what is learnt, on a thread of its own: once it can be trusted, then regularly."""

    def __init__(self, store: ProfileStore, model: CostModel) -> None:
        self.store = store
        self._model = model
        self._last_s: float | None = None
        self._saved_samples = model.num_samples
        self._nothing_saved = not model.profiled
        self._thread: threading.Thread | None = None
        self.error: str | None = None  # the last failure; only the first is logged

    def tick(self, now_s: float) -> None:
        """Save what was learnt if SAVE_EVERY_S have passed, or if it is the first model to trust.

        A server that is told to end may be killed before it has closed anything.
        """
        if self._last_s is None:
            self._last_s = now_s
        first = self._nothing_saved and self._model.trusted
        busy = self._thread is not None and self._thread.is_alive()
        if busy or (now_s - self._last_s < SAVE_EVERY_S and not first):
            return
        self._last_s = now_s
        if self._model.num_samples == self._saved_samples:
            return
        self.start()

    def start(self) -> None:
        """Save the model as it is now."""
        self._nothing_saved = False
        self._saved_samples = self._model.num_samples
        snapshot = self._model.to_dict()
        self._thread = threading.Thread(
            target=self._write, args=(snapshot,), name="ppbalance-save", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Save now what is not saved yet: the engine is going down."""
        if self._thread is not None:
            self._thread.join(timeout=5.0)
        if self._model.num_samples != self._saved_samples:
            self._saved_samples = self._model.num_samples
            self._write(self._model.to_dict())

    def _write(self, snapshot: Mapping[str, Any]) -> None:
        try:
            self.store.save(snapshot)
        except OSError as error:
            if self.error is None:
                logger.warning("ppbalance: %s cannot be written: %s", self.store.path, error)
            self.error = str(error)
