#!/usr/bin/env bash
# Stock vLLM against vLLM with ppbalance: real servers, PP=4, on this machine's CPU.
# Options are those of `python -m bench.demo --help`, for example --trace FILE.
set -euo pipefail

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
cd "$ROOT"
bash bench/setup_env.sh
# On the limit's signal demo.py stops its server and its client.
exec timeout --foreground --kill-after=60 1500 "$ROOT/.venv/bin/python" -m bench.demo "$@"
