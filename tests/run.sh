#!/usr/bin/env bash
# The whole test suite with its own set-up; about 20 minutes on a fresh machine with two cores.
set -euo pipefail

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
cd "$ROOT"
export HF_HUB_OFFLINE=1 VLLM_LOGGING_LEVEL=WARNING VLLM_NO_USAGE_STATS=1 PYTHONUNBUFFERED=1
unset PYTHONPATH

BIN="$ROOT/.venv/bin"
SUMMARY=()
FAILED=0

step() { # name limit_s command...
    local name="$1" limit="$2" start="$SECONDS" word=passed
    shift 2
    echo "== $name"
    # An interrupt, unlike a kill, lets pytest stop the servers it started.
    timeout --signal=INT --kill-after=60 "$limit" "$@" </dev/null || { word=FAILED FAILED=1; }
    SUMMARY+=("$(printf '%-44s %s  %4d s' "$name" "$word" "$((SECONDS - start))")")
}

schedulers_of() { # version; the sources stand before the installed release
    local version="$1"
    export PYTHONPATH="$ROOT/.vllm/$version" VLLM_TARGET_DEVICE=cpu
    timeout 120 "$BIN/python" -c "import vllm; print(vllm.__version__, vllm.__file__)
assert vllm.__version__ == '$version'" &&
        timeout --signal=INT --kill-after=60 700 \
            "$BIN/python" -m pytest -q -m scheduler --benchmark-disable
}

finished() { # name pid log
    local word=passed
    wait "$2" || { word=FAILED FAILED=1; }
    echo "== $1"
    cat "$3"
    SUMMARY+=("$(printf '%-44s %s' "$1" "$word")")
}

bash bench/setup_env.sh
# Downloads while other steps compute; the step below waits for it, or says what is wrong.
bash tests/fetch_vllm.sh >out/fetch.log 2>&1 </dev/null &

step "ruff check" 60 "$BIN/python" -m ruff check .
step "ruff format" 60 "$BIN/python" -m ruff format --check .
step "mypy" 300 "$BIN/python" -m mypy
step "layers" 120 "$BIN/lint-imports"
step "vLLM 0.32.0: which one is imported" 120 "$BIN/python" -c \
    "import vllm; print(vllm.__version__, vllm.__file__); assert vllm.__version__ == '0.32.0'"
step "vLLM 0.32.0: all tests without real engines" 900 "$BIN/python" -m pytest -q \
    -m "not real_vllm" --ignore tests/test_overhead.py
# In a process of its own, as an engine is: beside the leavings of a thousand tests all is slower.
step "vLLM 0.32.0: cost of a step" 300 "$BIN/python" -m pytest -q tests/test_overhead.py
step "vLLM 0.32.0: real engines" 1100 "$BIN/python" -m pytest -v -m real_vllm --durations=10
step "fetch the oldest and the newest vLLM" 900 bash tests/fetch_vllm.sh
# Both at a time: each keeps one core busy.
schedulers_of 0.23.0 >out/oldest.log 2>&1 </dev/null &
OLDEST=$!
schedulers_of 0.33.0 >out/newest.log 2>&1 </dev/null &
NEWEST=$!
finished "vLLM 0.23.0: scheduler tests" "$OLDEST" out/oldest.log
finished "vLLM 0.33.0: scheduler tests" "$NEWEST" out/newest.log

echo
echo "== summary, ${SECONDS} s"
printf '%s\n' "${SUMMARY[@]}"
exit "$FAILED"
