"""Flags of `vllm serve` and SGLang's server that change nothing in hunch, and those it refuses."""

from __future__ import annotations

COMPILED = "hunch's kernels and graphs are made by themselves"
LOG = "the log has a line for each request, without its text"
METRICS = "/metrics has what there is"
TEXT = "only text is served"
RANKS = "ranks find each other and add their parts in one way"
EXPERTS = "experts are split over ranks by their width"
GRAMMARS = "there is one grammar engine"
ATTENTION = "there is one attention per device"
FILES = "the files say themselves what they are"
CACHE = "KV is kept on the device, in blocks of its own for every kind of layer"
STEPS = "prompts share a step as its tokens allow, which is always planned while another runs"
ADAPTERS = "an adapter is merged into weights of its own"
CODE = "hunch never runs code that a flag, a model or a request names"
MACHINES = "a server is on one machine; several need a router, or Ray (docs/parallel.md)"


def by_flag(table: dict[str, str]) -> dict[str, str]:
    """By flag, from flags by what they share: a reason, or a word of ours."""
    return {flag: reason for reason, flags in table.items() for flag in flags.split()}


NOTHING = by_flag(  # switches
    {
        "usage always counts tokens found in the prefix cache": (
            "--enable-prompt-tokens-details --enable-cache-report"
        ),
        "answers always carry X-Request-Id": "--enable-request-id-headers",
        METRICS: """--enable-server-load-tracking --enable-metrics --enable-mfu-metrics
            --kv-cache-metrics --cudagraph-metrics --enable-metrics-for-all-schedulers
            --collect-tokens-histogram --enable-per-request-metrics""",
        "there are no such pages; /openapi.json has the schema": (
            "--disable-fastapi-docs --enable-offline-docs"
        ),
        LOG: """--disable-uvicorn-access-log --enable-log-outputs --show-time-cost
            --enable-request-time-stats-logging --aggregate-engine-logging""",
        "the engine is always a process of its own": "--disable-frontend-multiprocessing",
        EXPERTS: """--enable-expert-parallel --enable-ep-moe --enable-eplb --enable-dbo
            --disable-shared-experts-fusion --enable-dp-attention --enable-dp-lm-head
            --disable-flashinfer-cutlass-moe-fp4-allgather --enable-two-batch-overlap
            --enable-elastic-ep -ep""",
        "a row's result never depends on other rows": (
            "--disable-cascade-attn --enable-deterministic-inference"
        ),
        CACHE: """--disable-hybrid-kv-cache-manager --disable-hybrid-swa-memory
            --calculate-kv-scales --kv-sharing-fast-prefill --disable-sliding-window
            --enable-hierarchical-cache --enable-memory-saver --disable-chunked-prefix-cache""",
        TEXT: """--language-model-only --enable-multimodal --interleave-mm-strings
            --skip-mm-profiling --disable-mm-preprocessor-cache --disable-fast-image-processor""",
        COMPILED: """-O0 -O1 -O2 -O3 --disable-cuda-graph-padding --disable-piecewise-cuda-graph
            --flashinfer-mla-disable-ragged --triton-attention-reduce-in-fp32
            --delete-ckpt-after-loading --enable-nan-detection""",
        RANKS: """--ray-workers-use-nsight --enable-nccl-nvls --enable-symm-mem
            --enable-p2p-check --engine-use-ray""",
        STEPS: """--multi-step-stream-outputs --enable-mixed-chunk --disable-overlap-schedule
            --enable-tokenizer-batch-encode
            --sleep-on-idle --no-async-scheduling""",
        GRAMMARS: """--guided-decoding-disable-fallback --disable-outlines-disk-cache
            --guided-decoding-disable-any-whitespace
            --guided-decoding-disable-additional-properties
            --constrained-json-disable-any-whitespace""",
        "the environment is not looked at": "--fail-on-environ-validation",
        ADAPTERS: "--fully-sharded-loras",
        "a request's priority is heeded always": "--enable-priority-scheduling",
        "reasoning is told apart wherever the chat template marks it": "--enable-reasoning",
        "origins are allowed without cookies": "--allow-credentials",
        "a certificate is read at the start": "--enable-ssl-refresh",
        "tools are shown to the model as its template does it": (
            "--exclude-tools-when-tool-choice-none"
        ),
        "embeddings are served beside answers": "--is-embedding",
        "the last responses are always kept": "--enable-response-store",
        "answers of /generate always have them": "--return-output-ids",
        "scores are always float32": "--enable-fp32-lm-head",
    }
)  # fmt: skip
NOTHING_VALUED = by_flag(  # flags with a value
    {
        "the methods that the API has are allowed": "--allowed-methods",
        "all headers are allowed to the origins that are": "--allowed-headers",
        LOG: """--max-log-len --log-requests-level --log-level-http --log-config-file
            --crash-dump-folder --disable-access-log-for-endpoints --decode-log-interval""",
        METRICS: """--show-hidden-metrics-for-version --otlp-traces-endpoint
            --collect-detailed-traces --bucket-time-to-first-token --profiler-config
            --bucket-e2e-request-latency --bucket-inter-token-latency
            --tokenizer-metrics-custom-labels-header""",
        "the template itself shows how it reads content": "--chat-template-content-format",
        GRAMMARS: """--guided-decoding-backend --grammar-backend --structured-outputs-config
            --constrained-json-whitespace-pattern --constrained-json-max-whitespace-cnt""",
        COMPILED: """-O --optimization-level -cc --cudagraph-capture-sizes --cuda-graph-sizes
            --max-cudagraph-capture-size --cuda-graph-bs --torch-compile-max-bs --kernel-config
            --performance-mode --warmups""",
        STEPS: """--max-num-partial-prefills --max-long-partial-prefills --num-scheduler-steps
            --long-prefill-token-threshold --num-lookahead-slots --scheduler-delay-factor
            --max-prefill-tokens --schedule-conservativeness --num-continuous-decode-steps
            --renderer-num-workers --tokenizer-worker-num --tokenizer-pool-size
            --tokenizer-pool-type --ubatch-size""",
        CACHE: """--prefix-caching-hash-algo --mamba-cache-dtype --mamba-ssm-cache-dtype
            --mamba-ssm-dtype --max-mamba-cache-size --swa-full-tokens-ratio --kv-offloading-size
            --kv-offloading-backend --hicache-ratio --hicache-size --mamba-block-size
            --mamba-cache-mode""",
        CODE: "--code-revision",
        "the tokenizer is read from the model's own revision": "--tokenizer-revision",
        FILES: """--ignore-patterns --safetensors-load-strategy --quantization-param-path
            --speculative-draft-model-quantization --weight-version --pooler-config
            --override-pooler-config""",
        "models are read by one process": "--max-parallel-loading-workers",
        TEXT: """--allowed-local-media-path --allowed-media-domains --mm-processor-cache-gb
            --mm-encoder-tp-mode --mm-encoder-attn-backend --mm-attention-backend""",
        ATTENTION: """--attention-config --prefill-attention-backend --decode-attention-backend
            --override-attention-dtype --speculative-attention-mode --gdn-prefill-backend -ac""",
        EXPERTS: "--all2all-backend --moe-backend --moe-a2a-backend --moe-runner-backend",
        ADAPTERS: """--max-cpu-loras --max-loras-per-batch --lora-target-modules --lora-backend
            --lora-dtype --lora-extra-vocab-size""",
        RANKS: """--data-parallel-backend --data-parallel-rpc-port --master-port --dist-timeout
            --numa-node --distributed-timeout-seconds -dpp -dpb""",
        "requests that begin alike go to the same engine": "--load-balance-method",
        "tokens are sent as they come": "--stream-interval",
        "uvicorn's own limit holds": "--h11-max-incomplete-event-size",
        "nothing reads it": """--additional-config --override-neuron-config --reasoning-config
            --file-storage-path""",
        "matches are looked up as long as they pay": """--speculative-ngram-max-match-window-size
            --speculative-ngram-min-match-window-size --speculative-ngram-max-bfs-breadth
            --speculative-ngram-min-bfs-breadth --speculative-ngram-match-type
            --speculative-ngram-max-trie-depth --speculative-ngram-branch-length
            --speculative-ngram-capacity""",
        "a drafter's files say how long its blocks are": "--speculative-dflash-block-size",
    }
)
MANY = frozenset(  # of them, flags with several values
    """--cudagraph-capture-sizes --cuda-graph-sizes --cuda-graph-bs --bucket-time-to-first-token
    --bucket-e2e-request-latency --bucket-inter-token-latency --lora-target-modules
    --disable-access-log-for-endpoints --ignore-patterns --collect-detailed-traces""".split()  # noqa: SIM905
)
REFUSED = by_flag(
    {
        CODE: """--tool-parser-plugin --reasoning-parser-plugin --middleware --logits-processors
            --io-processor-plugin --scheduler-cls --worker-extension-cls
            --enable-custom-logit-processor""",
        MACHINES: """--data-parallel-address --data-parallel-hybrid-lb --headless --master-addr
            --dist-init-addr -dpa -dph""",
        "write it into config.json beside a copy of the model's files": ("--hf-config-path"),
        "let a proxy check the certificates of clients": "--ssl-ca-certs --ssl-cert-reqs",
        "HTTP is served: OpenAI's routes": "--grpc",
        "prompts are text or tokens": "--enable-prompt-embeds --enable-mm-embeds",
        "/tokenize and the model's own files say it": "--enable-tokenizer-info-endpoint",
        "give --kv-bytes or --num-blocks": "--max-total-tokens",
        "send truncate_prompt_tokens in a request": "--allow-auto-truncate",
        "/tokenize gives the ids of a prompt": "--return-input-ids",
        "features stay inside": "--enable-return-hidden-states --enable-return-routed-experts",
        "give --quantization, or weights that are quantised": "--torchao-config",
        "give --chat-template, a template or a file": """--completion-template
            --hf-chat-template-name""",
        "give speculate='eagle:PATH', whose files bring their own": "--speculative-token-map",
        "give --verifier typical": "--typical-acceptance-sampler-posterior-threshold",
    }
)
