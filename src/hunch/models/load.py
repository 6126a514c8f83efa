"""From weight files to a decoder, checked before anything is read."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from hunch.config import QUANTIZATIONS, ModelConfig, say_once
from hunch.errors import ConfigError, ModelFormatError
from hunch.models import staging
from hunch.models.arrange import Arranged
from hunch.models.build import Names
from hunch.models.decoder import Decoder
from hunch.models.source import EXPAND, HOLDS, KEEP, FileSource, ShapeSource
from hunch.models.spec import ModelSpec
from hunch.models.stage import WHOLE, Stage, StageWeights, stage_spec
from hunch.models.weights.base import Packed, ReadsParts, Weights, iterate, part_of, read_ahead
from hunch.parallel.group import SINGLE, Group
from hunch.registry import MODELS, resolve

log = logging.getLogger("hunch")

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
MIN_KEPT_WIDTH = 1024  # from this width on a GPU's time goes into reading bytes, not into launches
# Keys with the number of drafting layers, which come after the others.
DRAFTING_LAYERS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "mtp_num_layers")
_AGAIN = "Download the model again, with the config that belongs to it"
_ROWS_COMPARED = 4096  # at once, of two tables that may be one
_MAX_NAMED = 6  # tensors an error names before it counts the rest
# Stored by older tools though they follow from the config, or drafting heads, which a target does
# not need.
_IGNORED = re.compile(r"rotary_emb\.inv_freq$|(^|\.)mtp(_layers)?\.|masked_bias$|rope_freqs")
# Parts for pictures or sound beside a text model, if the config does not mention them.
_OTHER_SENSES = re.compile(
    r"^(model\.)?(embed_)?(vision|visual|image|video|audio|speech|multi_?modal|mm_|vit\b|vpm\b|"
    r"resampler\b|patch_merger\b|connector\b|projector\b|merger\b|aligner\b|generation_|vqmodel\b|"
    r"high_res_|talker\b|token2wav\b|code2wav\b)"
)


def load_decoder(
    weights: Weights,
    *,
    dtype: str = "auto",
    device: str | torch.device = "cpu",
    group: Group = SINGLE,
    stage: Stage = WHOLE,
    hold: str | None = None,
    max_len: int = 0,
) -> Decoder:
    """The model of `weights`, on `device`. `auto` is float32 on a CPU, else the file's own.

    `hold` says how matrices are held (source.HOLDS); None: in few bits where dtype says so or, on a
    GPU, where the file does. `max_len`: positions continue up to there, if that is past its
    context.
    """
    spec = reaching(spec_of(weights), max_len)
    device = torch.device(device)
    family: type[Decoder] = resolve(MODELS, spec.architecture)
    read_ahead(weights.path)
    weights = Arranged(weights, spec, family.names)
    hold = hold or choose_hold(dtype, spec, device)
    if stage.count > 1:
        weights = StageWeights(weights, spec, family.names, stage)
        spec = stage_spec(spec, stage)
    source = FileSource(weights, choose_dtype(dtype, spec, device), device, group, hold)
    check_tensors(spec, source)
    decoder = family(spec, source, iterate)
    decoder.reach(max_len)
    staging.release()
    if source.expanded:
        formats, name = ", ".join(sorted(source.expanded)), str(source.dtype).removeprefix("torch.")
        log.warning("no GPU kernel for %s: these matrices are expanded to %s", formats, name)
    return decoder


def reaching(spec: ModelSpec, max_len: int) -> ModelSpec:
    """The spec with positions up to `max_len` at least, unless they are learned."""
    return spec if spec.rope is None else replace(spec, max_len=max(spec.max_len, max_len))


def spec_of(weights: Weights) -> ModelSpec:
    """The config's spec. If it does not say whether the embedding is the output matrix too, the
    tensors decide: defaults differ between families, and newer tools leave them out."""
    spec = ModelSpec.from_config(weights.config)
    names: Names = resolve(MODELS, spec.architecture).names
    _check_layers(spec, weights, names)
    head = names.head
    is_given = weights.config.get("tie_word_embeddings") is not None
    has_head = is_given or any(name.endswith(head) for name in weights.names())
    is_whole = not spec.embed_width  # a projected table is no output matrix
    is_tied = spec.is_tied or (is_whole and not has_head)
    return replace(spec, is_tied=is_tied and not _has_own_head(weights, names))


def _has_own_head(weights: Weights, names: Names) -> bool:
    """Whether the files have an output matrix that is not the embedding; as in transformers, that
    counts more than the config."""
    found, ours = weights.names(), names.roots[0]
    tables = [root + names.embed.removeprefix(ours) for root in names.roots]
    table = next((name for name in tables if name in found), None)
    head = next(
        (name for name in found if name in (names.head, f"language_model.{names.head}")), ""
    )
    if table is None or not head or weights.shape(table) != weights.shape(head):
        return False
    num_rows = weights.shape(table)[0]
    step = _ROWS_COMPARED if isinstance(weights, ReadsParts) else num_rows
    for first in range(0, num_rows, step):
        part = first, min(first + step, num_rows)
        rows, others = (part_of(weights, name, 0, part, torch.float32) for name in (table, head))
        if not rows.equal(others):
            say_once(
                f"{weights.path} holds an output matrix ({head}) that differs from the embedding: "
                "it is used, though the config says that the embedding is one"
            )
            return True
    return False


def _check_layers(spec: ModelSpec, weights: Weights, names: Names) -> None:
    """Raise where the files hold fewer layers than the config counts, before they are built.

    If they hold more, and not to draft, only warn: a user may want the first ones.
    """
    roots = "|".join(re.escape(root) for root in names.roots)
    before = re.escape(names.layer.partition("{}")[0].removeprefix("model."))
    matches = [re.match(rf"(?:{roots}){before}(\d+)\.", name) for name in weights.names()]
    count = 1 + max((int(match[1]) for match in matches if match), default=-1)
    if 0 < count < spec.num_layers:
        raise ModelFormatError(
            f"the config counts {spec.num_layers} layers and the files hold {count}. {_AGAIN}"
        )
    is_drafting = any("nextn" in name or "mtp" in name for name in weights.names())
    drafting = [weights.config.get(key) for key in DRAFTING_LAYERS]
    if count > spec.num_layers and not is_drafting and not any(drafting):
        say_once(
            f"{weights.path} holds {count} layers and its config counts {spec.num_layers}: "
            "the others are passed by"
        )


def dtype_of(model: ModelConfig, weights: Weights) -> str:
    """The dtype a user asked for, directly or as `quantization`; raises if files differ."""
    if model.quantization is None:
        return model.dtype
    meant = QUANTIZATIONS[model.quantization]
    there = getattr(weights, "method", "gguf" if weights.metadata else None)
    if there in meant:
        return model.dtype
    asked = meant[0]
    if there is None and asked in HOLDS and model.dtype in ("auto", asked):
        return asked
    if there is None and asked in HOLDS:
        raise ConfigError(f"quantization={asked!r} and dtype={model.dtype!r}: give one of them")
    raise ConfigError(
        f"quantization={model.quantization!r}: the model's files are "
        f"{'not quantised' if there is None else repr(there)}. Leave it out: the files say it"
        + ("; or give fp8, int8 or int4, which round them as they are loaded" * (there is None))
    )


def choose_hold(dtype: str, spec: ModelSpec, device: torch.device) -> str:
    """How matrices are held: as dtype says, or on a GPU as the file has them."""
    if dtype in HOLDS:
        return dtype
    is_kept = device.type == "cuda" and dtype == "auto" and spec.width >= MIN_KEPT_WIDTH
    return KEEP if is_kept else EXPAND


def choose_dtype(dtype: str, spec: ModelSpec, device: torch.device) -> torch.dtype:
    if dtype == "auto" or dtype in HOLDS:
        if device.type == "cpu":
            return torch.float32  # 16-bit products are many times slower there
        return _DTYPES["float16" if spec.dtype == "float16" else "bfloat16"]
    if dtype not in _DTYPES:
        raise ConfigError(f"dtype={dtype!r} is not one torch computes in: {', '.join(_DTYPES)}")
    return _DTYPES[dtype]


def tensor_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Every tensor a model of this spec consists of."""
    source = ShapeSource()
    if spec.rope is not None:  # no tensor depends on the context; long tables take time
        spec = replace(spec, max_len=1)
    resolve(MODELS, spec.architecture)(spec, source)
    return source.shapes


class MadeWeights:
    """Base of `Weights` whose tensors are made when they are asked for, in a model's shapes."""

    def __init__(
        self,
        config: dict[str, Any],
        spec: ModelSpec,
        path: Path = Path(),
        metadata: Mapping[str, Any] | None = None,
    ) -> None:
        self.config, self.path, self.metadata = config, path, metadata or {}
        self.shapes = tensor_shapes(spec)
        self.nbytes = 2 * sum(map(math.prod, self.shapes.values()))

    def names(self) -> list[str]:
        return list(self.shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        return self.shapes[name]

    def packed(self, name: str) -> Packed | None:
        return None


def expert_params(spec: ModelSpec, shapes: dict[str, tuple[int, ...]]) -> int:
    """Parameters of the experts that tokens choose among."""
    names: Names = resolve(MODELS, spec.architecture).names
    each = (names.experts.gate, names.experts.up, names.experts.down)
    some = "|".join(re.escape(name) for name in each).replace(r"\{\}", r"\d+")
    expert = re.compile(rf"\.({some})\.")
    return sum(math.prod(shape) for name, shape in shapes.items() if expert.search(name))


def check_tensors(spec: ModelSpec, source: FileSource, given: Collection[str] = ()) -> None:
    """Raise for tensors that are missing, of another shape, or that nothing would read.

    Those `given` come from elsewhere: the files need not have them, and they are not read.
    """
    expected = {name: shape for name, shape in tensor_shapes(spec).items() if name not in given}
    found = {name: source.find(name) for name in expected}
    missing = [name for name, there in found.items() if there is None]
    if missing:
        raise ModelFormatError(f"the model's files lack {_some(missing)}. {_AGAIN}")
    wrong = [
        f"{there} {tuple(source.weights.shape(there))}, expected {expected[name]}"
        for name, there in found.items()
        if there is not None and tuple(source.weights.shape(there)) != expected[name]
    ]
    if wrong:
        raise ModelFormatError(
            f"tensors whose shape contradicts the config: {_some(wrong)}. {_AGAIN}"
        )
    extra = set(source.weights.names()) - set(found.values())
    extra = {name for name in extra if name not in given and not _may_stay_unread(name, spec)}
    if others := sorted(name for name in extra if _OTHER_SENSES.search(name)):
        extra -= set(others)
        say_once(f"only text is read: {_some(others)} are passed by")
    if extra:
        raise ModelFormatError(
            f"the config does not account for {_some(sorted(extra))}; ignoring them would change "
            "the text"
        )


def _may_stay_unread(name: str, spec: ModelSpec) -> bool:
    names: Names = resolve(MODELS, spec.architecture).names
    if _IGNORED.search(name) or (names.unread and re.search(names.unread, name)):
        return True
    if spec.is_tied and name == names.head:
        return True
    layer = re.search(r"(?:^|\.)layers\.(\d+)\.", name)
    if layer is None:
        return False
    if int(layer[1]) >= spec.num_layers:  # a drafting head's layers
        return True
    # Some files have key and value matrices of layers that read other layers' keys and values.
    return (
        spec.is_reader(int(layer[1]))
        and re.search(r"\.self_attn\.[kv]_(proj|norm)\.", name) is not None
    )


def _some(names: list[str]) -> str:
    rest = len(names) - _MAX_NAMED
    return "; ".join(names[:_MAX_NAMED]) + (f"; and {rest} more" if rest > 0 else "")
