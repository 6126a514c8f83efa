"""Flags of llama.cpp's `llama-server`, as words of `hunch serve`."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from hunch.compat.server_words import by_flag
from hunch.config import say_once
from hunch.errors import ConfigError

_MEMORY = "files are mapped, and read as they are needed"
_KERNELS = "hunch has one attention and one layout of KV per device"
_PATHS = "these paths are always there"
_THREADS = "--threads says how many compute"
_DRAFTED = "how much is drafted follows what is accepted"
_REQUEST = "send it with a request"
_SAMPLER = "hunch has no such sampler"
_OVERRIDES = "give --hf-overrides, whose values stand in place of the file's"
_DEVICE = "set CUDA_VISIBLE_DEVICES, or give --device cpu or --tensor-parallel-size"


_RENAMED = by_flag(  # with a value
    {
        "--model": "-m -hf -hfr --hf-repo",
        "--threads": "-t",
        "--max-model-len": "-c --ctx-size",
        "--max-num-seqs": "-np --parallel",
        "--max-num-batched-tokens": "-b --batch-size",
        "--served-model-name": "-a --alias",
        "--speculative-model": """-md --model-draft --spec-draft-model -hfd -hfrd
            --hf-repo-draft --spec-draft-hf""",
        "--num-speculative-tokens": "--draft --draft-n --draft-max --spec-draft-n-max",
        "--seed": "-s",
        "--default-chat-template-kwargs": "--chat-template-kwargs",
        "--chat-template": "--chat-template-file",
        "--ssl-keyfile": "--ssl-key-file",
        "--ssl-certfile": "--ssl-cert-file",
        "--root-path": "--api-prefix",
        "--request-timeout": "-to --timeout",
        "--sse-keep-alive-interval": "--sse-ping-interval",
        "--max-loaded-models": "--models-max",
        "--hf-token": "-hft",
    }
)
_SAMPLING = by_flag(  # -> fields of a generation_config.json
    {
        "temperature": "--temp --temperature",
        "top_k": "--top-k",
        "top_p": "--top-p",
        "min_p": "--min-p",
        "repetition_penalty": "--repeat-penalty",
        "max_new_tokens": "-n --predict --n-predict",
    }
)
_NOTHING = by_flag(  # switches
    {
        "requests always share steps": "-cb --cont-batching -nocb --no-cont-batching",
        "templates are always rendered": "--jinja --no-jinja",
        "prompts are taken as they are": "-e --escape --no-escape --spm-infill",
        "special tokens are asked for by skip_special_tokens": "-sp --special",
        "prefixes are found again by themselves": "--cache-prompt --cache-idle-slots "
        "--no-cache-idle-slots",
        "a begun answer goes on where a request asks for it": (
            "--prefill-assistant --no-prefill-assistant"
        ),
        "reasoning is shown as the template does it": (
            "--reasoning-preserve --no-reasoning-preserve"
        ),
        "the page is served unless --no-page says otherwise": "--ui --webui",
        "/metrics has what there is": "--perf --no-perf",
        "origins are allowed without cookies": "--cors-credentials --no-cors-credentials",
        "one process listens": "--reuse-port",
        "drafts are chosen as the target chooses": """-bs --backend-sampling
            --spec-draft-backend-sampling --no-spec-draft-backend-sampling""",
        "embeddings are served beside answers": "--embedding --embeddings",
        _MEMORY: "--mlock --no-mmap --mmap -dio --direct-io -ndio --no-direct-io --check-tensors",
        _KERNELS: """-kvu --kv-unified -no-kvu --no-kv-unified --swa-full -nkvo --no-kv-offload
            -kvo --kv-offload --repack -nr --no-repack --no-host --op-offload
            --no-op-offload""",
        _PATHS: "--slots --no-slots --props --metrics",
        "kernels are made ready at the start": "--warmup --no-warmup",
        "a text ends where the context does": "--context-shift --no-context-shift",
        "only text is served": """--no-mmproj --mmproj-auto --no-mmproj-auto --mmproj-offload
            --no-mmproj-offload""",
        "the log has a line for each request": """--log-disable --log-timestamps --log-prefix
            --no-log-prefix --no-log-timestamps""",
    }
)
_NOTHING_VALUED = by_flag(
    {
        _KERNELS: """-fa --flash-attn -ub -ctxcp --ctx-checkpoints --swa-checkpoints -dt
            --defrag-thold -cms --checkpoint-min-step""",
        _THREADS: """-tb --threads-batch --threads-http --prio --poll --numa -C --cpu-mask
            -Cr --cpu-range --cpu-strict -Cb --cpu-mask-batch -Crb --cpu-range-batch
            --cpu-strict-batch --prio-batch --poll-batch -td --threads-draft -tbd
            --threads-batch-draft -Cd --cpu-mask-draft -Crd --cpu-range-draft --cpu-strict-draft
            --prio-draft --poll-draft -Cbd --cpu-mask-batch-draft --cpu-strict-batch-draft
            --prio-batch-draft --poll-batch-draft""",
        "that sampler is off": """--xtc-threshold --dry-base --dry-allowed-length
            --dry-penalty-last-n --dry-sequence-breaker --adaptive-decay --dynatemp-exp
            --mirostat-lr --mirostat-ent""",
        "the log has no colours": "--log-colors",
        "requests that begin alike share what is computed": "-sps --slot-prompt-similarity",
        "/v1/embeddings takes normalize": "--embd-normalize",
        "the page needs no settings": """--ui-config --webui-config --ui-config-file
            --webui-config-file""",
        "the methods and headers that the API has are allowed": "--cors-methods --cors-headers",
        "a model has the names of --alias": "--tags",
        "only text is served": """--image-min-tokens --image-max-tokens --mtmd-batch-max-tokens
            -mmdev --mmproj-device --media-path""",
        "--idle-unload says when further models are unloaded": "--sleep-idle-seconds",
        "prefixes are found again by themselves": "--cache-reuse -cram --cache-ram",
        _DRAFTED: "--draft-min --draft-n-min --draft-p-min --draft-p-split",
        "--log-level says how much is logged": "-lv --verbosity --log-verbosity",
        "the order of samplers is hunch's own": "--samplers --sampling-seq --sampler-seq",
        "penalties look at all tokens": "--repeat-last-n",
        "the drafter is where the target is": """-ngld --gpu-layers-draft -cd --ctx-size-draft
            --n-gpu-layers-draft -devd --device-draft -ctkd --cache-type-k-draft -ctvd
            --cache-type-v-draft -otd --override-tensor-draft -ncmoed --n-cpu-moe-draft""",
        "all of a prompt is kept": "--keep",
        _MEMORY: "-fit --fit -fitt --fit-target -fitc --fit-ctx -lm --load-mode -lzm --lazy-mode",
    }
)
_REFUSED = by_flag(
    {
        "only text is served": "-mm --mmproj -mmu --mmproj-url",
        _REQUEST: """--grammar --grammar-file -j --json-schema -jf --json-schema-file --ignore-eos
            --pooling -l --logit-bias -r --reverse-prompt --reasoning-budget-message""",
        _DEVICE: """-ts --tensor-split -ot --override-tensor -ncmoe --n-cpu-moe -cmoe --cpu-moe
            -cmoed --cpu-moe-draft --spec-draft-cpu-moe""",
        "the log goes to standard error: give 2> FILE": "--log-file",
        _OVERRIDES: "--override-kv",
        "give a path, or -hf REPO:QUANT": "-mu --model-url -dr --docker-repo -hff --hf-file",
        "an adapter's own file says its scale: give --lora PATH": """--lora-scaled
            --lora-init-without-apply""",
        "features stay as the model computes them": """--control-vector --control-vector-scaled
            --control-vector-layer-range""",
        "a server is on one machine": "--rpc",
        "hunch doctor and hunch models say it": "--list-devices -cl --cache-list",
        "name the models: hunch serve A B=PATH": """--models-dir --models-preset
            --models-autoload --no-models-autoload""",
        "the server runs no tools: clients do": """--tools --tools-runtime --mcp-servers-config
            --mcp-servers-json -ag --agent --ui-mcp-proxy --webui-mcp-proxy""",
        "give --prompt-log FILE": "--log-prompts-dir",
        "give --tool-call-parser and --reasoning-parser": "--skip-chat-parsing",
        "this server does not rank: /v1/embeddings gives vectors": "--reranking --rerank",
        "no slots are kept in files": "--slot-save-path",
        "give --speculate suffix:shared=true, which learns from answers": """-lcs -lcd
            --lookup-cache-static --lookup-cache-dynamic""",
        "the page is hunch's own; --no-page serves none": "--path",
    }
)
_SWITCHES = by_flag(  # -> our words
    {
        "--log-level debug": "-v --verbose --log-verbose",
        "--log-format json": "--log-jsonl",
        "--no-page": "--no-ui --no-webui",
        "--speculate suffix": "--spec-default",
        "--no-enable-prefix-caching": "--no-cache-prompt",
        "": """--no-log-jsonl --no-skip-chat-parsing -no-ag --no-agent --no-ui-mcp-proxy
            --no-webui-mcp-proxy""",
    }
)
_SPEC_TYPES = {  # of --spec-type -> our methods
    **dict.fromkeys(("ngram-simple", "ngram-map-k", "ngram-map-k4v"), "ngram"),
    **dict.fromkeys(("ngram-cache", "ngram-mod"), "suffix"),
    **dict.fromkeys(("draft", "draft-simple"), "draft"),
    "draft-mtp": "mtp",
    "draft-eagle3": "eagle3",
    "draft-dflash": "dflash",
}
# flag -> values that ask for nothing, and what to do for others
_NEUTRAL: dict[str, tuple[tuple[object, ...], str]] = {
    **dict.fromkeys(("--presence-penalty", "--frequency-penalty"), ((0,), _REQUEST)),
    **dict.fromkeys(("--dry-multiplier", "--xtc-probability"), ((0,), _SAMPLER)),
    **dict.fromkeys(("--mirostat", "--dynatemp-range"), ((0,), _SAMPLER)),
    **dict.fromkeys(("--typical", "--typical-p"), ((1,), _SAMPLER)),
    **dict.fromkeys(("--top-nsigma", "--top-n-sigma"), ((-1, 0), _SAMPLER)),
    "--adaptive-target": ((-1,), _SAMPLER),
    **dict.fromkeys(("--yarn-ext-factor", "--yarn-beta-slow"), ((-1,), _OVERRIDES)),
    **dict.fromkeys(("--yarn-attn-factor", "--yarn-beta-fast"), ((-1,), _OVERRIDES)),
    **dict.fromkeys(("--yarn-orig-ctx", "--rope-freq-base"), ((0,), _OVERRIDES)),
    **dict.fromkeys(("--rope-freq-scale", "--rope-scale"), ((0, 1), _OVERRIDES)),
    **dict.fromkeys(("-mg", "--main-gpu"), ((0,), _DEVICE)),
    **dict.fromkeys(("-sm", "--split-mode"), (("none", "layer"), _DEVICE)),
    "--reasoning-budget": ((-1,), "send thinking_token_budget with a request"),
}
_SPLIT = ("-sm", "--split-mode")  # its values are words
_BY_ITSELF = ("-t", "--threads", "-np", "--parallel", "-s", "--seed")  # -1: as hunch does it
_ON_OFF = ("on", "off", "auto", "true", "false", "1", "0")
_PRESETS = ("--fim-", "--gpt-oss-", "--vision-", "--embd-gemma-")
_KV_TYPES = {"f16": [], "bf16": [], "f32": [], "q8_0": ["--kv-cache-dtype", "int8"]}
_FURTHER = ("--spec-ngram-", "--spec-draft-")  # settings of llama.cpp's drafters, with a value
_THINKING = ("-rea", "--reasoning")
_SWITCHED = {  # its values; None: as the template does it
    **dict.fromkeys(("on", "enabled", "true", "1"), True),
    **dict.fromkeys(("off", "disabled", "false", "0"), False),
    **dict.fromkeys(("auto", "-1"), None),
}
LAYERS = ("-ngl", "--gpu-layers", "--n-gpu-layers")
_CACHE_TYPES = ("-ctk", "-ctv", "--cache-type-k", "--cache-type-v")
_VALUED = {  # flags with a value
    *(*_RENAMED, *_SAMPLING, *_NOTHING_VALUED, *_NEUTRAL, *LAYERS, *_CACHE_TYPES, *_THINKING),
    *("--reasoning-format", "--spec-type", "--reasoning-effort", "--api-key-file", "-dev"),
}


def from_llamacpp(words: Sequence[str]) -> list[str]:
    """The words with llama.cpp's flags by the names that `hunch serve` knows."""
    rest, found = _without_drafts(words), []
    sampling: dict[str, float] = {}
    while rest:
        flag = rest.pop(0)
        if flag in _REFUSED:
            raise ConfigError(f"{flag}: {_REFUSED[flag]}")
        if flag in _NOTHING:
            say_once(f"{flag} has no effect: {_NOTHING[flag]}")
        elif flag in _SWITCHES:
            found += _SWITCHES[flag].split()
        elif flag == "--offline":
            os.environ["HF_HUB_OFFLINE"] = "1"
        elif flag.endswith(("-default", "-spec")) and flag.startswith(_PRESETS):
            raise ConfigError(f"{flag}: give -hf MODEL and the flags it stands for")
        elif flag in ("-fa", "--flash-attn") and (not rest or rest[0] not in _ON_OFF):
            say_once(f"{flag} has no effect: {_KERNELS}")  # older ones have no value
        elif flag in _BY_ITSELF and rest[:1] == ["-1"]:
            rest.pop(0)
        elif (flag in _VALUED or flag.startswith(_FURTHER)) and rest:
            found += _meant(flag, rest.pop(0), sampling)
        else:
            found.append(flag)
    return found + (["--override-generation-config", json.dumps(sampling)] if sampling else [])


def _without_drafts(words: Sequence[str]) -> list[str]:
    """The words; `--spec-type none` without a draft model: without drafts. A draft's length alone
    does not say what drafts."""
    found = list(words)
    is_none = ("--spec-type", "none") in pairwise(found)
    names = [name for name, ours in _RENAMED.items() if ours == "--speculative-model"]
    lengths = [name for name, ours in _RENAMED.items() if ours == "--num-speculative-tokens"]
    others = [flag for flag in found if flag not in lengths]
    is_named = any(flag in names or flag.startswith(("--spec", "-sc")) for flag in others)
    if any(name in found for name in names) or (is_named and not is_none):
        return found
    for name in lengths:
        if name in found:
            length = found[found.index(name) : found.index(name) + 2]
            del found[found.index(name) : found.index(name) + 2]
            if not is_none:
                say_once(f"{' '.join(length)} has no effect without -md or --spec-type")
    return [*found, "--speculate", "off"] if is_none else found


def _meant(flag: str, value: str, sampling: dict[str, float]) -> list[str]:
    if flag in _SAMPLING:
        number = _number(flag, value)
        if _SAMPLING[flag] != "max_new_tokens" or number > 0:  # -1: no limit
            sampling[_SAMPLING[flag]] = number
        return []
    if flag in _NOTHING_VALUED or (flag.startswith(_FURTHER) and flag not in _VALUED):
        say_once(f"{flag} {value} has no effect: {_NOTHING_VALUED.get(flag, _DRAFTED)}")
        return []
    if flag == "--spec-type":
        return _spec_type(value)
    if flag in _THINKING:
        if value not in _SWITCHED:
            raise ConfigError(f"{flag} {value} is not one of {', '.join(_SWITCHED)}")
        is_on = _SWITCHED[value]
        return [] if is_on is None else _template(enable_thinking=is_on)
    if flag == "--reasoning-budget" and value == "0":
        return _template(enable_thinking=False)
    if flag == "--reasoning-effort":
        return [] if value == "default" else _template(reasoning_effort=value)
    if flag == "--api-key-file":
        return [word for key in _lines(value) for word in ("--api-key", key)]
    if flag == "-dev" and value == "none":
        return ["--device", "cpu"]
    if flag == "-dev":
        raise ConfigError(f"{flag} {value}: {_DEVICE}")
    if flag in _NEUTRAL:
        values, instead = _NEUTRAL[flag]
        if value not in values and (flag in _SPLIT or _number(flag, value) not in values):
            raise ConfigError(f"{flag} {value}: {instead}")
        return []
    if flag in LAYERS:
        return device_of(flag, value)
    if flag in _CACHE_TYPES:
        if value not in _KV_TYPES:
            raise ConfigError(f"{flag} {value} is not supported; only {', '.join(_KV_TYPES)}")
        return _KV_TYPES[value]
    if flag == "--reasoning-format":
        return ["--reasoning-parser", "none"] if value == "none" else []
    if flag in ("-c", "--ctx-size") and value == "0":
        return []  # the model's own
    return [_RENAMED[flag], value]


def device_of(flag: str, layers: str) -> list[str]:
    """What a number of layers on the GPU means."""
    if layers != "0":
        say_once(f"{flag} {layers} has no effect: all layers are on one device")
    return ["--device", "cpu"] if layers == "0" else []


def _template(**values: object) -> list[str]:
    return ["--default-chat-template-kwargs", json.dumps(values)]


def _lines(path: str) -> list[str]:
    try:
        return [line.strip() for line in Path(path).read_text().splitlines() if line.strip()]
    except OSError as error:
        raise ConfigError(f"--api-key-file {path}: {error.strerror}") from None


def _spec_type(value: str) -> list[str]:
    if value == "none":
        return []
    if value not in _SPEC_TYPES:
        known = ", ".join(["none", *_SPEC_TYPES])
        raise ConfigError(f"--spec-type {value} is not one of {known}; see also --speculate")
    return ["--speculative-config.method", _SPEC_TYPES[value]]


def _number(flag: str, value: str) -> float:
    try:
        return int(value) if value.lstrip("-").isdecimal() else float(value)
    except ValueError:
        raise ConfigError(f"{flag} {value}: a number is needed") from None
