#!/usr/bin/env bash
# Pipeline against tensor parallelism on two GPUs, over their link and without it; one engine after
# another, about 30 minutes on two H200. bash bench/gpu/two_gpus.sh OUT AZURE_CONV_CSV [PART...]
set -u
OUT="$1" TRACE="$2"
shift 2
export VLLM_USE_V2_MODEL_RUNNER=1 VLLM_USE_FLASHINFER_SAMPLER=0 VLLM_ALLREDUCE_USE_SYMM_MEM=0
export NCCL_NVLS_ENABLE=0 HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1
mkdir -p "$OUT" out

serve() { # folder plan pp tp engine
    mkdir -p "$OUT/$1"
    python3 -m bench.gpu.pp_serving --out "$OUT/$1" --plan "configs/gpu/$2.yaml" \
        --trace "$TRACE" --pp "$3" --tp "$4" --engine "$5" --stop-after "${STOP_AFTER:-1e9}" \
        >"$OUT/$1/log.txt" 2>&1 </dev/null
}

part() {
    case "$1" in
        pp2) serve pp2 pp2_h200_balanced 2 1 '{}' ;;
        rest) serve pp2_rest pp2_h200_rest 2 1 '{}' ;;
        one_channel) NCCL_MAX_P2P_NCHANNELS=1 serve pp2_one_channel pp2_h200_one_channel 2 1 '{}' ;;
        tp2) serve tp2 tp2_h200 1 2 '{}' ;;
        tp2_no_p2p) NCCL_P2P_DISABLE=1 serve tp2_no_p2p tp2_h200_no_p2p 1 2 \
            '{"disable_custom_all_reduce": true}' ;;
        pp2_no_p2p) NCCL_P2P_DISABLE=1 serve pp2_no_p2p pp2_h200_no_p2p 2 1 '{}' ;;
        server) python3 -m bench.gpu.serve_check "$OUT/server" --model qwen2.5-14b-stage \
            >"$OUT/server.txt" 2>&1 </dev/null ;;
        tokens) python3 -m bench.gpu.same_tokens "$OUT/tokens" --pp 2 \
            >"$OUT/tokens.txt" 2>&1 </dev/null ;;
        *) echo "unknown part $1" >&2 ;;
    esac
}

nvidia-smi --query-gpu=timestamp,index,clocks.sm,power.draw,temperature.gpu \
    --format=csv,noheader -lms 500 >>"$OUT/clocks.csv" &
CLOCKS=$!
[ "$#" -gt 0 ] || set -- pp2 rest one_channel tp2 tp2_no_p2p pp2_no_p2p server tokens
for name in "$@"; do part "$name"; done
kill "$CLOCKS"
