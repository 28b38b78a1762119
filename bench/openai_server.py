"""What `bench serve` asks an OpenAI endpoint itself: its model, its limits, an empty cache."""

import json
import os
import time
import urllib.error
import urllib.request
from dataclasses import asdict, dataclass
from typing import Any

TIMEOUT_S = 30.0
FLUSH_TRIES, FLUSH_PAUSE_S = 10, 1.0


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A running server. `max_model_len` in tokens and vLLM's version where the server tells."""

    url: str
    model: str
    max_model_len: int | None = None
    version: str | None = None

    def as_json(self) -> dict[str, Any]:
        """Plain values without the address, which may change from one start to the next."""
        return {name: value for name, value in asdict(self).items() if name != "url"}


def look_at(base_url: str, model: str | None = None) -> ServedModel:
    """The server's model, its first one unless `model` names another. Raises ValueError."""
    url = base_url.rstrip("/").removesuffix("/v1")
    if not url.startswith(("http://", "https://")):
        raise ValueError(f"--base-url {base_url}: must start with http:// or https://")
    try:
        cards = _json("GET", f"{url}/v1/models")["data"]
        known = {str(card["id"]): card for card in cards}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"--base-url {base_url}: no OpenAI server answers there: {error}"
        ) from None
    if not known:
        raise ValueError(f"--base-url {base_url}: the server has no model")
    name = next(iter(known)) if model is None else model
    if name not in known:
        raise ValueError(f"--model {name}: the server has: {', '.join(known)}")
    longest = known[name].get("max_model_len")
    return ServedModel(url, name, None if longest is None else int(longest), _version(url))


def flush_prefix_cache(url: str) -> str | None:
    """Empties the server's prefix cache; None if that was done, else why not."""
    for _ in range(FLUSH_TRIES):
        try:
            done = _json("POST", f"{url}/reset_prefix_cache").get("success", True)
        except urllib.error.HTTPError as error:
            return f"it has no /reset_prefix_cache ({error.code}); VLLM_SERVER_DEV_MODE=1 adds it"
        except (OSError, ValueError) as error:
            return f"/reset_prefix_cache: {error}"
        if done:
            return None
        time.sleep(FLUSH_PAUSE_S)  # the last answers may still be on their way
    return f"/reset_prefix_cache: the server still holds blocks after {FLUSH_TRIES} tries"


def _version(url: str) -> str | None:
    try:
        return str(_json("GET", f"{url}/version")["version"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _json(method: str, url: str) -> Any:
    request = urllib.request.Request(url, method=method)
    if key := os.environ.get("OPENAI_API_KEY"):
        request.add_header("Authorization", f"Bearer {key}")
    with urllib.request.urlopen(request, timeout=TIMEOUT_S) as response:
        text = response.read().decode()
    return json.loads(text) if text.strip() else {}
