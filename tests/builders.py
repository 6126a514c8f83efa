"""Small models and packed steps for the tests of every folder.

Shape letters: T packed tokens, S sequences, B blocks, P tree depth.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hunch.kernels.attention import AttnInputs, Span
from hunch.kernels.kv_store import KVCache
from hunch.kernels.quant import Quantised
from hunch.layers.part import Part
from hunch.models.decoder import Decoder
from hunch.models.load import load_decoder, tensor_shapes
from hunch.models.spec import ModelSpec
from hunch.models.weights.base import Packed
from random_models import RandomSource

BLOCK_SIZE = 4


def replace_tensors(part: Part, change: Callable[[Tensor], Tensor]) -> None:
    """Put `change(tensor)` in place of every tensor; one that is shared stays shared."""
    changed = {id(tensor): change(tensor) for _, tensor in part.named_tensors()}
    for each in list(part.parts()):
        for name, value in list(vars(each).items()):
            if isinstance(value, Tensor):
                setattr(each, name, changed[id(value)])
            elif isinstance(value, Quantised):
                for key, tensor in value.tensors().items():
                    setattr(value, key, changed[id(tensor)])


def tiny_config(architecture: str = "LlamaForCausalLM", **changes: Any) -> dict[str, Any]:
    """A config.json of a model that runs in a millisecond; None removes a key."""
    if architecture in ("GPT2LMHeadModel", "GPTBigCodeForCausalLM"):
        sizes = {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_inner": 48, "n_positions": 256}
        given = {"architectures": [architecture], "vocab_size": 96, "from_gguf": True}
        return given | sizes | changes
    if architecture == "OPTForCausalLM":
        config: dict[str, Any] = {"ffn_dim": 48, "word_embed_proj_dim": 32}
    else:
        config = {
            "intermediate_size": 48,
            "num_key_value_heads": 2,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "tie_word_embeddings": False,
        }
    config |= {
        "architectures": [architecture],
        "vocab_size": 96,
        "hidden_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "max_position_embeddings": 256,
    }
    return {key: value for key, value in (config | changes).items() if value is not None}


def tiny_spec(architecture: str = "LlamaForCausalLM", **changes: Any) -> ModelSpec:
    return ModelSpec.from_config(tiny_config(architecture, **changes))


@dataclass
class DictWeights:
    """Weights of a dict: the protocol of weight files without a file."""

    config: dict[str, Any]
    tensors: dict[str, Tensor]
    path: Path = Path("memory")
    metadata: Mapping[str, Any] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in self.tensors.values())

    def names(self) -> list[str]:
        return list(self.tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.tensors[name].shape)

    def tensor(self, name: str, dtype: torch.dtype = torch.float32) -> Tensor:
        return self.tensors[name].to(dtype)

    def packed(self, name: str) -> Packed | None:
        return None


def tiny_weights(
    config: dict[str, Any] | None = None, seed: int = 0, scale: float = 1.0
) -> DictWeights:
    """Random tensors of every name the config's model has."""
    config = config or tiny_config()
    source = RandomSource(seed, scale=scale)
    shapes = tensor_shapes(ModelSpec.from_config(config))
    return DictWeights(config, {name: source.read(name, shape) for name, shape in shapes.items()})


def tiny_model(
    architecture: str = "LlamaForCausalLM", seed: int = 0, scale: float = 1.0, **changes: Any
) -> Decoder:
    return load_decoder(tiny_weights(tiny_config(architecture, **changes), seed, scale))


@dataclass
class Seq:
    """One sequence's share of a step: known tokens from position `start` on, then a draft."""

    ids: Sequence[int]
    start: int = 0
    draft: Sequence[int] = ()
    parents: Sequence[int] | None = None  # None: the draft is a chain


def tables(num_seqs: int, num_blocks: int = 16) -> Tensor:
    """Block tables without a block in common and without order, as a busy cache has them."""
    order = torch.randperm(num_seqs * num_blocks, generator=torch.Generator().manual_seed(7))
    return order.view(num_seqs, num_blocks)


def pack(
    seqs: Sequence[Seq],
    table_SB: Tensor | None = None,
    block_size: int = BLOCK_SIZE,
    num_padding: int = 0,
) -> tuple[Tensor, AttnInputs]:
    """Packed token ids of a step, and where each writes and reads."""
    if table_SB is None:
        table_SB = tables(len(seqs))
    ids: list[int] = []
    pos: list[int] = []
    slot: list[int] = []
    row: list[int] = []
    base: list[int] = []
    paths: list[list[int]] = []
    spans: list[Span] = []
    for index, seq in enumerate(seqs):

        def at(position: int, index: int = index) -> int:
            return int(table_SB[index, position // block_size]) * block_size + (
                position % block_size
            )

        first, known = len(ids), seq.start + len(seq.ids)
        is_tree = seq.parents is not None
        parents = list(range(-1, len(seq.draft) - 1)) if seq.parents is None else seq.parents
        depth: list[int] = []
        node_paths: list[list[int]] = []
        for node, parent in enumerate(parents):
            depth.append(0 if parent < 0 else depth[parent] + 1)
            node_paths.append([*(node_paths[parent] if parent >= 0 else []), at(known + node)])
        ids += [*seq.ids, *seq.draft]
        pos += [*range(seq.start, known), *(known + d for d in depth)]
        slot += [at(seq.start + i) for i in range(len(seq.ids) + len(seq.draft))]
        row += [index] * (len(ids) - first)
        base += [known if is_tree else known + len(seq.draft) + 1] * (len(ids) - first)
        paths += [[]] * len(seq.ids) + (node_paths if is_tree else [[]] * len(seq.draft))
        spans.append(Span(first, len(ids), index, seq.start, len(seq.ids), is_tree))
    ids, pos, row = ids + [0] * num_padding, pos + [0] * num_padding, row + [0] * num_padding
    slot, base, paths = (
        slot + [-1] * num_padding,
        base + [1] * num_padding,
        paths + [[]] * num_padding,
    )
    longest = max(map(len, paths), default=0)
    tree_TP = torch.tensor([[*path, *[0] * (longest - len(path))] for path in paths])
    attn = AttnInputs(
        pos_T=torch.tensor(pos),
        slot_T=torch.tensor(slot),
        seq_T=torch.tensor(row),
        table_SB=table_SB,
        base_T=torch.tensor(base),
        tree_TP=tree_TP if longest else None,
        block_size=block_size,
        spans=tuple(spans),
    )
    return torch.tensor(ids), attn


def new_kv(model: Decoder, num_seqs: int = 1, num_blocks: int = 16) -> KVCache:
    """Room for the sequences of `tables`; unwritten slots hold what must never be read."""
    kv = model.new_kv(num_seqs * num_blocks * BLOCK_SIZE)
    for k_CMH, v_CMH in kv.layers():
        k_CMH.fill_(torch.nan)
        v_CMH.fill_(torch.nan)
    return kv


def plain_logits(model: Decoder, ids: Sequence[int]) -> Tensor:
    """Scores after every token of a sequence, in one pass from an empty cache."""
    num_blocks = -(-len(ids) // BLOCK_SIZE)
    ids_T, attn = pack([Seq(ids)], tables(1, num_blocks))
    hidden = model.forward(ids_T, attn, new_kv(model, 1, num_blocks))
    return model.logits(hidden.last_TD)


def check_rows(model: Any) -> None:
    """A row is the same bits in batches of 1 to 64, read at once or in two pieces."""
    ids = torch.randint(0, 90, (64, 3), generator=torch.Generator().manual_seed(1)).tolist()
    table_SB = tables(64, 2)

    def last_rows(seqs: list[Seq], kv: KVCache) -> Tensor:
        ids_T, attn = pack(seqs, table_SB[: len(seqs)])
        attn.row_S = torch.arange(len(seqs))
        hidden_TD = model.forward(ids_T, attn, kv).last_TD
        return hidden_TD[[span.last - 1 for span in attn.spans]]

    expected = last_rows([Seq(prompt) for prompt in ids], model.new_kv(64 * 8, 64))
    assert len(expected.unique(dim=0)) == 64
    for size in (1, 2, 7, 16, 33):
        kv = model.new_kv(64 * 8, 64)
        last_rows([Seq(prompt[:2]) for prompt in ids[:size]], kv)
        rows = last_rows([Seq(prompt[2:], start=2) for prompt in ids[:size]], kv)
        assert rows.equal(expected[:size])
