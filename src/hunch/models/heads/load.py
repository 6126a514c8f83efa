"""Which method a drafter's files belong to, read from its config.json."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hunch.errors import UnsupportedModelError
from hunch.models.heads.draft_model import CUT_FROM
from hunch.models.heads.files import read_config
from hunch.models.weights import open_weights

_ARCHITECTURES = {
    "MLPSpeculatorPreTrainedModel": "mlp",
    "MedusaModel": "medusa",
    "EagleModel": "eagle",
    "EagleLlamaForCausalLM": "eagle",
    "LlamaForCausalLMEagle": "eagle",
    "LlamaForCausalLMEagle3": "eagle3",
    "Eagle3LlamaForCausalLM": "eagle3",
    "Eagle3Speculator": "eagle3",
    "Eagle3DraftModel": "eagle3",
    "MiMoMTPModel": "mtp",
    "DeepSeekMTPModel": "mtp",
    "DeepseekV3ForCausalLMNextN": "mtp",
    "Qwen3NextMTP": "mtp",
}
_MODEL_TYPES = {
    "mlp_speculator": "mlp",
    "medusa": "medusa",
    "eagle": "eagle",
    "eagle3": "eagle3",
    "mimo_mtp": "mtp",
    "deepseek_mtp": "mtp",
    "qwen3_next_mtp": "mtp",
}
_MTP_KEYS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "mtp_num_layers")


def detect(path: str | Path) -> str:
    """The registry name of the method that drafts with the files at `path`."""
    if Path(path).suffix == ".gguf":
        return "draft"
    config = read_config(path)
    if CUT_FROM in config:
        return "draft"
    kind = config.get("speculators_model_type")
    if kind is not None:
        if kind != "eagle3":
            raise UnsupportedModelError(
                f"{path}: speculators_model_type={kind!r} is not supported; hunch reads eagle3"
            )
        return "eagle3"
    for name in config.get("architectures") or ():
        if name in _ARCHITECTURES:
            return _ARCHITECTURES[name]
    if config.get("model_type") in _MODEL_TYPES:
        return _MODEL_TYPES[config["model_type"]]
    if "medusa_num_heads" in config:
        return "medusa"
    if any(key in config for key in _MTP_KEYS) and "architectures" not in config:
        return "mtp"
    if "draft_vocab_size" in config or "eagle_config" in config:
        return "eagle3"
    if _is_eagle(Path(path), config):
        return "eagle"
    return "draft"


def _is_eagle(path: Path, config: dict[str, Any]) -> bool:
    """EAGLE-1 heads call themselves LlamaForCausalLM; only their tensors tell them apart."""
    if config.get("num_hidden_layers") != 1:
        return False
    names = {name.removeprefix("model.") for name in open_weights(path).names()}
    return "fc.weight" in names and "norm.weight" not in names


def speculative_tokens(path: str | Path) -> int | None:
    """How many tokens per step the files themselves ask for, where they say it."""
    config = read_config(path)
    for key in ("n_predict", "num_heads"):
        if isinstance(config.get(key), int):
            return int(config[key])
    methods = (config.get("speculators_config") or {}).get("proposal_methods") or ()
    for method in methods:
        if isinstance(method, dict) and isinstance(method.get("speculative_tokens"), int):
            return int(method["speculative_tokens"])
    return None
