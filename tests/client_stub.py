"""Run in the place of vLLM's client: `client_stub.py TRACE RESULT FAIL`, answers at once.

Every request gets its first token after 0.5 s and the others every 0.01 s, but for the last FAIL of
them, which fail. FAIL "dies" ends the client itself.
"""

import json
import sys
from pathlib import Path


def main() -> None:
    trace, result, fail = sys.argv[1:]
    if fail == "dies":
        sys.exit("the client's own words")
    rows = [json.loads(line) for line in Path(trace).read_text().splitlines()]
    answered = len(rows) - int(fail)
    good = [index < answered for index in range(len(rows))]
    outputs = [row["output_length"] for row in rows]
    gaps = [[0.01] * (n - 1) if ok else [] for n, ok in zip(outputs, good, strict=True)]
    saved = {
        "completed": answered,
        "start_times": [100.0 + row["timestamp"] for row in rows],
        "ttfts": [0.5 if ok else 0.0 for ok in good],
        "itls": gaps,
        "latencies": [0.5 + sum(own) if ok else 0.0 for own, ok in zip(gaps, good, strict=True)],
        "input_lens": [row["input_length"] for row in rows],
        "output_lens": [n if ok else 0 for n, ok in zip(outputs, good, strict=True)],
        "errors": ["" if ok else "Traceback\nServerDisconnectedError" for ok in good],
    }
    print(f"{len(rows)}/{len(rows)} [00:01<00:00]", file=sys.stderr)
    Path(result).write_text(json.dumps(saved))


if __name__ == "__main__":
    main()
