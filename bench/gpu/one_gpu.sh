#!/usr/bin/env bash
# What one GPU can tell: tokens with and without the plugin, the profile of single stages, the
# predictor online, the cost of a step, one stage's times cold and under load, and four stages that
# share the GPU. About 25 minutes on an H200. bash bench/gpu/one_gpu.sh OUT AZURE_CONV_CSV
set -u
OUT="$1" TRACE="$2"
export VLLM_USE_V2_MODEL_RUNNER=1 VLLM_USE_FLASHINFER_SAMPLER=0 HF_HUB_OFFLINE=1
export VLLM_NO_USAGE_STATS=1 NCCL_NVLS_ENABLE=0
mkdir -p "$OUT" out

stage() { # model name engine-argument...
    local model="$1" name="$2"
    shift 2
    mkdir -p "$OUT/$name"
    python3 -m bench.gpu.models "$model" "$OUT/$name/model"
    PPBALANCE_PROFILING__DIRECTORY="$OUT/$name" python3 -m vllm_ppbalance profile \
        --model "$OUT/$name/model" --skip-tokenizer-init --load-format dummy \
        --max-model-len 32768 --max-num-batched-tokens 8192 --max-num-seqs 512 \
        --no-enable-prefix-caching "$@" >"$OUT/$name/log.txt" 2>&1 </dev/null
}

serve() { # folder plan pp model engine
    mkdir -p "$OUT/$1"
    python3 -m bench.gpu.pp_serving --out "$OUT/$1" --plan "configs/gpu/$2.yaml" --trace "$TRACE" \
        --pp "$3" --model "$4" --engine "$5" >"$OUT/$1/log.txt" 2>&1 </dev/null
}

one_stage() {
    stage qwen2.5-32b-stage 32b --async-scheduling
    stage qwen2.5-32b-stage 32b_eager --async-scheduling --enforce-eager
    stage qwen2.5-14b-stage 14b --async-scheduling
    serve stage stage_h200 1 qwen2.5-32b-stage \
        '{"scheduler_cls": "vllm_ppbalance.plugin.StageScheduler"}'
    gzip -c out/online.jsonl >"$OUT/stage/online.jsonl.gz"
}

rows() {
    serve rows stage_rows_h200 1 qwen2.5-32b-stage \
        '{"scheduler_cls": "vllm_ppbalance.plugin.StageScheduler"}'
}

# Four processes on one GPU need an NCCL of 2.30 or later: NEW_NCCL names its library. With 32
# connections each the fourth finds no memory for its context.
shared() { # command...
    export CUDA_MPS_PIPE_DIRECTORY="$OUT/mps" CUDA_MPS_LOG_DIRECTORY="$OUT/mps"
    export CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=25 NCCL_MULTI_RANK_GPU_ENABLE=1 VLLM_DISABLE_PYNCCL=1
    export NCCL_MAX_P2P_NCHANNELS=1 CUDA_DEVICE_MAX_CONNECTIONS=8
    mkdir -p "$OUT/mps"
    nvidia-cuda-mps-control -d
    LD_PRELOAD="${NEW_NCCL:-}" "$@"
    echo quit | nvidia-cuda-mps-control
}

four_stages() {
    shared serve pp4 pp4_one_h200 4 qwen2.5-14b \
        '{"worker_cls": "bench.gpu.shared_gpu.Worker", "kv_cache_memory_bytes": 17179869184,
          "gpu_memory_utilization": 0.1}'
}

server() { # folder engine-argument...
    local name="$1"
    shift
    shared python3 -m bench.gpu.serve_check "$OUT/$name" --pp 4 --model qwen2.5-14b-stage --rate 1 \
        --worker-cls bench.gpu.shared_gpu.Worker --kv-cache-memory-bytes 8589934592 \
        --gpu-memory-utilization 0.1 --distributed-executor-backend mp "$@" \
        >"$OUT/$name.txt" 2>&1 </dev/null
}

for part in ${PARTS:-tokens one_stage rows server server_sync four_stages}; do
    case "$part" in
        tokens) python3 -m bench.gpu.same_tokens "$OUT/tokens" >"$OUT/tokens.txt" 2>&1 </dev/null ;;
        server) server server ;;
        server_sync) VLLM_USE_V2_MODEL_RUNNER=0 server server_sync --no-async-scheduling ;;
        *) "$part" ;;
    esac
done
