#!/usr/bin/env bash
# Pipeline against tensor parallelism on two GPUs, over their link and without it: two engines at a
# time share the GPUs' memory and take turns. About 25 minutes; bench/gpu/two_gpus.sh OUT TRACE [S].
set -u
OUT="$1" TRACE="$2" LIMIT_S="${3:-1500}"
export VLLM_USE_V2_MODEL_RUNNER=1 VLLM_USE_FLASHINFER_SAMPLER=0 VLLM_ALLREDUCE_USE_SYMM_MEM=0
export NCCL_NVLS_ENABLE=0 HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1
mkdir -p "$OUT"

serve() { # folder plan pp tp limit engine [more arguments]
    local folder="$OUT/$1" plan="$2" pp="$3" tp="$4" limit="$5" engine="$6"
    shift 6
    mkdir -p "$folder"
    python3 -m bench.gpu.pp_serving --out "$folder" --plan "configs/gpu/$plan.yaml" \
        --trace "$TRACE" --pp "$pp" --tp "$tp" --engine "$engine" --stop-after "$limit" "$@" \
        >"$folder/log.txt" 2>&1 </dev/null
    touch "$folder/done" "$OUT/$1.up" # also where it failed: the other one goes on
}

# Leaves room for two engines: 32.5 GB of weights and 28 GiB of KV cache each.
MEMORY='"gpu_memory_utilization": 0.3, "kv_cache_memory_bytes": 30064771072'
nvidia-smi --query-gpu=timestamp,index,clocks.sm,power.draw,temperature.gpu \
    --format=csv,noheader -lms 500 >"$OUT/clocks.csv" &
CLOCKS=$!

serve tp2 tp2_h200 1 2 "$((LIMIT_S * 85 / 100))" "{$MEMORY}" \
    --ready "$OUT/tp2.up" --after "$OUT/pp2/done" &
TENSOR=$!
serve pp2 pp2_h200_balanced 2 1 "$((LIMIT_S * 63 / 100))" "{$MEMORY}" --after "$OUT/tp2.up"
wait "$TENSOR"

export NCCL_P2P_DISABLE=1
serve tp2_no_p2p tp2_h200_no_p2p 1 2 "$LIMIT_S" "{$MEMORY, \"disable_custom_all_reduce\": true}" \
    --ready "$OUT/tp2_no_p2p.up" --after "$OUT/pp2_no_p2p/done" &
TENSOR=$!
serve pp2_no_p2p pp2_h200_no_p2p 2 1 "$LIMIT_S" "{$MEMORY}" --after "$OUT/tp2_no_p2p.up"
wait "$TENSOR"
kill "$CLOCKS"
touch "$OUT/done"
