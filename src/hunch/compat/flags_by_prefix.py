"""Flags of `vllm serve` and SGLang's server that have no meaning here, most by how they begin."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from hunch.compat.server_words import (
    ADAPTERS,
    ATTENTION,
    CACHE,
    CODE,
    COMPILED,
    EXPERTS,
    FILES,
    LOG,
    MACHINES,
    METRICS,
    NOTHING,
    NOTHING_VALUED,
    RANKS,
    REFUSED,
    STEPS,
    TEXT,
    by_flag,
)

_ONE_ENGINE = "one engine reads prompts and writes answers; --replicas N are several"
_DRAFTS = "how much is drafted follows what is accepted and what passes cost"
_NOTHING = by_flag(
    {
        ATTENTION: """--dsa- --nsa- --dsv4- --kda- --gdn- --linear-attn- --linear-backend
            --triton-attention- --sparse-indexer- --enable-dsa- --enable-nsa- --enable-gdn-
            --enable-lean-attention --qsa- --speculative-dsa-
            --c128- --enable-hisparse --hisparse- --hierarchical-sparse- --enable-deepseek-v4-""",
        CACHE: """--hicache- --mamba- --enable-mamba- --enable-lmcache --lmcache- --enable-flexkv
            --flexkv- --radix- --kv-canary --int8-mamba- --enable-int8-mamba- --replayssm-
            --use-replayssm --enable-linear-replayssm --linear-replayssm- --prefix-match-unit
            --prefix-cache-retention- --prefill-only- --swa-bounded-replay --kv-cache-metrics-
            --enable-session-radix- --strip-thinking-cache --enable-unified-memory
            --enable-page-major- --engram-config --watermark --uses-mamba- --retraction-policy
            --enable-kv-cache-sharding --enable-hicache --enable-unified-cache- --unified-cache-
            --enable-linker- --swa-prefix- --enable-encoder-swa- --enable-decoder-swa-
            --prefill-kv-cache-
            --enable-shm-tensor-arena --sleep-mode- --sleep-preserve- --enable-cumem-""",
        COMPILED: """--cuda-graph- --piecewise-cuda-graph- --enforce-piecewise- --jit-monitor-
            --disable-decode-cuda- --disable-prefill-cuda- --debug-cuda-graph --enable-breakable-
            --enable-cudagraph- --enable-profile-cuda- --enable-torch-compile- --ir-op-priority
            --enable-flashinfer- --disable-flashinfer- --flashinfer- --enforce-disable-flashinfer-
            --bf16-gemm- --fp4-gemm- --fp8-gemm- --monokernel --enable-fused- --enable-tf32-
            --enable-hc- --enable-scattered- --enable-aiter- --enable-layerwise- --enable-batch-
            --mlx- --disable-aiter- --enable-amd- --enable-nvidia- --context-bucket
            --enable-quant-communications --enable-mis --enable-mscclpp --enable-torch-symm-""",
        EXPERTS: """--deepep- --eplb- --ep-dispatch- --ep-num- --expert- --init-expert- --fuseep-
            --elastic-ep- --enable-elastic- --max-ep-size --ep-join- --moe-dense- --enable-eplb-
            --enable-expert-distribution- --enforce-shared-experts- --kt- --enable-w4a4- --dbo-
            --enable-shared-experts- --shared-experts- --enable-paged-experts --paged-experts-
            --enable-megamoe- --speculative-enable-w4a4-
            --enable-ep-weight- --tbo- --enable-single-batch- --enable-waterfill --dwdp-""",
        FILES: """--weight-loader- --weight-cache- --remote-instance-weight- --safetensors-prefetch-
            --seed-listen --seed-source --seed-token --startup-weight- --modelexpress-
            --checkpoint-engine- --pt-load- --model-config-parser --load-snapshot-
            --enable-weights-cpu- --enable-draft-weights- --weight-transfer- --snapshot-dir
            --allow-deprecated- --offload- --cpu-offload-params --decrypted- --ple-offload-""",
        LOG: """--log-requests- --log-error-stack --enable-log-deltas --uvicorn-access-log-
            --enable-logging-iteration- --gc-warning- --logging-config""",
        METRICS: """--prompt-tokens-buckets --generation-tokens-buckets --extra-metric-labels
            --tokenizer-metrics- --enable-forward-pass- --forward-pass- --enable-trace --trace-
            --otlp- --load-publish-
            --custom-histogram-buckets --per-request-spec-decode-metrics --spec-trace-""",
        RANKS: """--numa- --pre-warm-nccl --nccl- --enable-nccl- --disable-nccl- --dp-sync- --dcp-
            --boundary-reduction --enable-dense-mlp- --enable-layernorm-sp
            --cp- --enable-cp- --enable-prefill-c --prefill-cp- --pp-async-
            --pp-max- --mooncake-ib- --use-fp64-gumbel
            --cpu-distributed- --enable-attn-tp- --disable-attn-tp- --enable-tp- --enable-dp-
            --dp-supervisor- --enable-fault- --fault-tolerance- --soft-watchdog- --watchdog-""",
        STEPS: """--prefill-delayer- --enable-prefill-delayer --prefill-max- --prefill-decode-
            --prefill-round- --prefill-schedule- --optimistic-prefill- --scheduler-recv-
            --scheduler-reserve- --min-free-slots- --num-reserved- --enable-dynamic- --gc-threshold
            --dynamic-batch- --batch-notify- --disable-tokenizer-batch- --long-prefill-
            --detokenizer-worker- --tokenizer-backend --max-num-scheduled- --max-num-active-
            --max-num-queued-tokens --enable-pdmux --pdmux- --sm-group- --enable-mixed-moe-
            --image-processor-""",
        ADAPTERS: """--max-loaded-loras --max-lora- --lora-eviction- --lora-strict- --lora-drain-
            --uno-lora- --lora-use- --enable-lora-
            --experts-shared- --enable-moe-shared- --specialize-active-
            --default-mm-loras --enable-tower-""",
        TEXT: """--mm- --media- --video- --keep-mm- --limit-mm-data- --enable-mm-
            --enable-prefix-mm-
            --enable-broadcast-mm- --trust-request-mm- --trust-mm- --asr- --enable-precise-
            --language-only --omni --enable-flash-late-""",
        _DRAFTS: """--speculative-adaptive --speculative-dflash- --speculative-dspark-
            --speculative-draft-attention- --speculative-draft-kv- --speculative-draft-load-
            --speculative-draft-window- --speculative-draft-sink- --speculative-domino-
            --speculative-moe- --speculative-skip-
            --speculative-ngram- --enable-multi-layer-eagle""",
        "--workers processes share one address": "--enable-http-worker-",
        "HTTP/1.1 is served; a proxy may speak HTTP/2": "--enable-http2 --http2-",
        "the limits on what is sent are hunch's own": "--h11-",
        "a lower priority goes first, and keeps its row": """--default-priority- --disable-priority-
            --priority-scheduling- --schedule-low-priority- --abort-on-priority-""",
        "a call's arguments are always held to their schema": "--tool-strict-level",
        "answers are told apart by their ids": "--fingerprint-",
        "the chat template says how chats are written": "--cohere-",
    }
)  # fmt: skip
_REFUSED = by_flag(
    {
        _ONE_ENGINE: """--disaggregation- --enable-scale-out --tokens-only --decoupled-spec-
            --encoder- --ec- --data-parallel-external-lb --data-parallel-multi- --mm-encoder-only
            --enable-adaptive-dispatch- --data-parallel-supervisor- --enable-pd- -dpe -dpm""",
        CODE: """--forward-hooks --custom-weight-loader --stat-loggers --custom-sigquit- --sidecar
            --tool-server --model-class-overrides --msprobe-""",
        MACHINES: "--use-ray --engine-info-bootstrap-",
        "hunch writes from left to right": "--dllm- --diffusion-config -dc",
        "tensors are not written to files": "--debug-tensor-",
        "/metrics has them": "--export-metrics-",
        "give --quantization, or weights that are quantised": """--modelopt- --quantize-and-serve
            --quantization-config --kv-cache-dtype-skip- --rl-quant-""",
        "HTTP is served: OpenAI's routes": "--grpc- --smg- --enable-streaming-session",
        "give a key that has no password": "--ssl-keyfile-password",
        "let a proxy choose the ciphers": "--ssl-ciphers",
        "every key of --api-key may ask for everything": "--admin-api-key",
        "compare the files' digests before": "--model-checksum",
        "features and masks stay inside": """--return-sampling-mask --sampling-mask-
            --enable-return-indexer- --aux-output-config --enable-return-aux- --return-aux-""",
        "a trainer loads the weights it wrote": "--rl-on-policy-",
        "texts carry no watermark": "--watermark-config --enable-watermark",
        "set CUDA_VISIBLE_DEVICES": "--device-ids",
        "send reasoning_effort with a request": "--reasoning-effort-map --anthropic-disabled-",
        "give the path of that revision": "--speculative-draft-model-revision",
        "give thinking_token_budget in a request": "--enable-strict-thinking",
    }
)  # fmt: skip
_SWITCHES = ("--enable-", "--disable-", "--enforce-", "--debug-", "--use-", "--strip-", "--trust-",
             "--keep-", "--monokernel", "--language-only", "--abort-", "--allow-",
             "--schedule-low-", "--prefill-only-", "--mlx-", "--tokens-only", "--omni",
             "--return-sampling-mask", "--lora-use-",
             "--experts-shared-", "--lora-strict-", "--weight-loader-d", "--log-error-stack",
             "--swa-bounded-replay", "--pre-warm-nccl", "--data-parallel-external-lb",
             "--quantize-and-serve", "--uses-mamba-", "--prefill-round-", "--dcp-replicate-",
             "--dcp-q-", "--specialize-active-", "--cohere-is-", "--mm-encoder-only",
             "--long-prefill-token-threshold-adaptive", "--scheduler-reserve-", "--dllm-fdfo",
             "--ple-offload-embedding", "--speculative-enable-", "-dpe", "-dpm")  # fmt: skip


_KNOWN = {"--cuda-graph-max-bs", "--mm-processor-kwargs", "--max-lora-rank"}  # and have a meaning
_EXACT = (REFUSED, NOTHING, NOTHING_VALUED)
_OPPOSITES = (("--no-", "--"), ("--disable-", "--enable-"), ("--enable-", "--disable-"))


class Unused(NamedTuple):
    """A flag that has no meaning here."""

    why: str
    is_refused: bool
    is_switch: bool  # it has no value


def unused_flag(flag: str) -> Unused | None:
    """What is known of a flag that has no meaning here. The opposite of one asks for nothing."""
    if found := _listed(flag):
        return found
    for opposite in _opposites(flag):
        found = _listed(opposite)
        if found and (found.is_switch or opposite in REFUSED or flag.startswith("--no-")):
            return Unused(found.why, is_refused=False, is_switch=True)
    return None


def _listed(flag: str) -> Unused | None:
    if flag in _KNOWN:
        return None
    for table in _EXACT:
        if flag in table:
            return Unused(table[flag], table is REFUSED, table is NOTHING)
    for table, is_refused in ((_REFUSED, True), (_NOTHING, False)):
        found = [name for name in table if flag.startswith(name)]
        if found:
            is_switch = flag.startswith(_SWITCHES) and not flag.startswith("--monokernel-")
            return Unused(table[max(found, key=len)], is_refused, is_switch)
    return None


def _opposites(flag: str) -> Iterator[str]:
    """Switches that a flag turns off: vLLM has --no-X of X, and --disable-X of --enable-X."""
    for prefix, other in _OPPOSITES:
        if flag.startswith(prefix):
            yield other + flag.removeprefix(prefix)
