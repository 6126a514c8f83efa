"""Block: one pass guesses a whole block of tokens (DSpark, arXiv 2607.05147), beside its target.

The backbone reads the target's fused states as its context; a Markov head adds what the token
before makes likely, a confidence head learns which guesses are right. The loss of a place is a
tenth of the cross-entropy and nine tenths of the whole difference to the target's distribution,
less the later the place.

Shape letters: B texts, L their length, T = B * L, R blocks of a text, P places of a block, M places
that teach, D width, C columns, K keys, N heads, H head width, A = q, k and v heads side by side.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from hunch.errors import ConfigError, UnsupportedModelError
from hunch.layers.attention import Attend, Attention, Heads, split_heads
from hunch.layers.norm import RMSNorm
from hunch.layers.rope import Rope
from hunch.models.build import build_block
from hunch.models.decoder import Decoder
from hunch.models.heads.block import BlockBody, BlockShape, build_body, context_heads
from hunch.models.source import ShapeSource
from hunch.models.spec import ModelSpec
from hunch.models.weights import Weights
from hunch.train.batches import put
from hunch.train.cut import UNITS, check_units, fitted, read, strongest_units, with_units
from hunch.train.loss import teach
from hunch.train.masters import Masters
from hunch.train.recipes.eagle3 import read_features
from hunch.train.states import TargetOutputs
from hunch.train.student import (
    BatchLoss,
    Recipe,
    Student,
    layer_config,
    unlike_llama,
    unlike_llama_inside,
)
from hunch.train.vocab import Columns

MARKOV = "markov_head.markov_w{}.weight"
CONFIDENCE = "confidence_head.proj.weight"
MASK = "mask_embedding"
_TESTED = 32  # blocks of a text that are tested at once


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockOptions:
    """train block KEY=VALUE..."""

    layers: int = 4
    units: float = 1.0  # share of the units that each layer's MLP keeps
    block: int = 7  # tokens guessed by one pass
    features: str = ""  # "2,10,18,26,34": after how many target layers; empty: five, evenly
    anchors: int = 48  # blocks that each text teaches per step
    rank: int = 0  # of the Markov head; 0: 128, for targets 1,024 wide or wider 256
    loss: str = "l1"
    decay: float = 4.0  # places after which one counts a third

    def __post_init__(self) -> None:
        for name in ("layers", "anchors", "decay"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name}={getattr(self, name)} must be above 0")
        check_units(self.units)
        if not 2 <= self.block <= 32:
            raise ConfigError(f"block={self.block} must be from 2 to 32")


class BlocksOfTexts:
    """Who sees whom: places of a block their own block, and the context before its anchor."""

    def __init__(self, context_TD: Tensor, anchor_BR: Tensor, num_places: int, rope: Rope) -> None:
        num_texts, num_blocks = anchor_BR.shape
        length, device = len(context_TD) // num_texts, context_TD.device
        self.context_TD = context_TD
        self.known, self.own = (num_texts, length), (num_texts, num_blocks * num_places)
        pos_L = torch.arange(length, device=device)
        place_P = torch.arange(num_places, device=device)
        self.rotation = rope((anchor_BR[:, :, None] + place_P).flatten())
        self.context_rotation = rope(pos_L.repeat(num_texts))
        anchor_BT = anchor_BR.repeat_interleave(num_places, dim=1)
        block_T = torch.arange(num_blocks, device=device).repeat_interleave(num_places)
        is_own_BTT = (block_T[:, None] == block_T).expand(num_texts, -1, -1)
        is_seen_BTK = torch.cat((pos_L < anchor_BT[:, :, None], is_own_BTT), dim=2)
        # What is added to scores: made once, not by every layer.
        hidden = torch.finfo(context_TD.dtype).min
        self.bias_B1TK = torch.zeros(
            is_seen_BTK.shape, dtype=context_TD.dtype, device=device
        ).masked_fill_(~is_seen_BTK, hidden)[:, None]

    def of(self, attn: Attention) -> Attend:
        """How a layer's places attend, over its own keys and values of the context."""
        known = context_heads(attn, self.context_TD, self.context_rotation)

        def attend(
            qkv_TAH: Tensor, heads: Heads, layer: int, sinks_N: Tensor | None = None
        ) -> Tensor:
            parts = split_heads(qkv_TAH, heads, self.rotation)
            q, own_k, own_v = (_by_text(x, self.own) for x in parts)
            known_k, known_v = (_by_text(x, self.known) for x in known)
            group = heads.num_heads // heads.num_kv_heads
            # Kernels that add to scores take as many heads of keys as of queries.
            k = torch.cat((known_k, own_k), dim=2).repeat_interleave(group, dim=1)
            v = torch.cat((known_v, own_v), dim=2).repeat_interleave(group, dim=1)
            out = functional.scaled_dot_product_attention(
                q, k, v, attn_mask=self.bias_B1TK, scale=heads.scale
            )
            return out.transpose(1, 2).flatten(0, 1)

        return attend


def _by_text(x_TNH: Tensor, shape: tuple[int, int]) -> Tensor:
    """As attention takes them: text, head, position, width."""
    return x_TNH.reshape(*shape, *x_TNH.shape[1:]).transpose(1, 2)


class BlockStudent(Student):
    """Place s of a block anchored at a, which knows the states before a, tells token a + s + 1."""

    plain = (MARKOV.format(1), MARKOV.format(2), CONFIDENCE)

    def __init__(
        self, options: BlockOptions, target: Decoder, columns: Columns, weights: Weights
    ) -> None:
        super().__init__(target, columns)
        self.options, spec = options, target.spec
        self.feature_layers = _features(options.features, spec.num_layers)
        rank = options.rank or (256 if spec.width >= 1024 else 128)
        layers = min(options.layers, spec.num_layers)
        num_columns = len(columns) if len(columns) < spec.vocab_size else 0
        self.is_alike = not _differences(spec)
        own = layers_of_its_own(spec, layers)
        if self.is_alike:
            own = replace(
                spec, num_layers=layers, windows=(None,) * layers, has_mlp_bias=False, rope_of=()
            )
        own = with_units(own, options.units) if options.units < 1 else own
        assert own.rope is not None
        self.rope = Rope(own.rope, own.head_dim, spec.max_len + options.block, target.device)
        self.shape = BlockShape(
            spec=own,
            feature_layers=self.feature_layers,
            feature_width=len(self.feature_layers) * spec.width,
            num_places=options.block,
            mask_token=None,
            is_shifted=True,
            markov_rank=rank,
            has_confidence=True,
            confidence_sees_token=True,
            num_columns=num_columns,
        )
        self.config = weights.config if self.is_alike else {}
        self.head_CD = target.head.weight_NK[columns.ids_C] * spec.logits_scale
        self.layer_names = [f"layers.{layer}." for layer in range(layers)]
        self.start(self._begin(weights))

    def layer(self, x_TD: Tensor, source: Masters, texts: BlocksOfTexts) -> Tensor:
        block = build_block(self.shape.spec, source, "", 0)
        return block(x_TD, texts.of(block.attn))

    def _begin(self, weights: Weights) -> dict[str, Tensor]:
        """Layers start as the target's last ones, the rest as what changes nothing."""
        spec, target, generator = self.shape.spec, self.target, torch.Generator().manual_seed(2)
        names, width = target.names, spec.width
        first = target.spec.num_layers - spec.num_layers
        shapes, units = ShapeSource(), dict[int, Tensor]()
        build_body(self.shape, shapes)
        if self.is_alike and spec.ffn_width != target.spec.ffn_width:
            for layer in range(first, target.spec.num_layers):
                prefix = names.layer.format(layer)
                units[layer] = strongest_units(weights, prefix, names, spec.ffn_width)
        found: dict[str, Tensor] = {}
        for name, shape in shapes.shapes.items():
            if name.startswith("layers.") and self.is_alike:
                number, part = name.removeprefix("layers.").split(".", 1)
                layer = first + int(number)
                stored = read(weights, names.layer.format(layer) + part)
                found[name] = fitted(stored, shape, units.get(layer))
            elif name.startswith("layers."):
                found[name] = _new_tensor(name, shape, generator)
            else:
                found[name] = torch.zeros(shape)
        noise = torch.randn(width, self.shape.feature_width, generator=generator)
        found["fc.weight"] = 0.02 * noise
        found["fc.weight"][:, -width:] += torch.eye(width)
        found["norm.weight"] = found["hidden_norm.weight"] = torch.ones(width)
        if isinstance(target.final_norm, RMSNorm):
            found["norm.weight"] = target.final_norm.weight_D.float().cpu()
        if self.is_alike:
            name = names.layer.format(first) + "input_layernorm.weight"
            found["hidden_norm.weight"] = read(weights, name)
        embedding_VD = target.embedding_VD.float().cpu()
        found[MASK] = embedding_VD.mean(0)
        turn_DK = torch.randn(width, self.shape.markov_rank, generator=generator) * width**-0.5
        before_VK = embedding_VD @ turn_DK
        found[MARKOV.format(1)] = before_VK / before_VK.std().clamp(min=1e-6)
        return found

    def loss_on(self, outputs: TargetOutputs, *, is_test: bool = False) -> BatchLoss:
        body, t = build_body(self.shape, self.source()), outputs
        context_TD = body.context(t.features)
        place_T = torch.full((t.ids_BL.numel(),), -1)  # on the host, as all that is counted
        place_T[t.host_M] = torch.arange(len(t.row_M))
        loss, agreed = torch.zeros((), device=t.row_M.device), []
        if is_test:
            none_T = torch.zeros(t.ids_BL.numel(), dtype=torch.bool, device=t.row_M.device)
            agreed = [none_T.clone() for _ in range(self.options.block)]
        for anchor_BR, is_there_BR in self._anchors(t, is_test):
            loss = loss + self._teach(body, t, context_TD, anchor_BR, is_there_BR, place_T, agreed)
        for depth in range(1, len(agreed)):  # a guess counts where those before it were right
            agreed[depth] &= agreed[depth - 1].roll(1)
        return BatchLoss(loss, agreed)

    def _anchors(self, t: TargetOutputs, is_test: bool) -> Iterator[tuple[Tensor, Tensor]]:
        """Positions of blocks' first tokens: some by chance, or all, a part at a time."""
        is_taught_BL = (t.batch.host or t.batch).is_taught_BL().cpu()
        is_taught_BL[:, 0] = False  # nothing is known before it
        if not is_test:
            chance = torch.Generator().manual_seed(t.seed)
            noise_BL = torch.rand(is_taught_BL.shape, generator=chance)
            count = min(self.options.anchors, is_taught_BL.shape[1])
            best = (noise_BL + is_taught_BL).topk(count, dim=1)
            yield best.indices, best.values >= 1
            return
        for first in range(0, is_taught_BL.shape[1], _TESTED):
            pos_R = torch.arange(first, min(first + _TESTED, is_taught_BL.shape[1]))
            pos_BR = pos_R.expand(len(is_taught_BL), -1)
            is_there_BR = is_taught_BL.gather(1, pos_BR)
            if bool(is_there_BR.any()):
                yield pos_BR, is_there_BR

    def _teach(
        self,
        body: BlockBody,
        t: TargetOutputs,
        context_TD: Tensor,
        anchor_BR: Tensor,
        is_there_BR: Tensor,
        place_T: Tensor,
        agreed: list[Tensor],
    ) -> Tensor:
        """The loss of some blocks; marks where their guesses were right.

        Anchors and `place_T` are the host's: which places teach is counted there, so that the
        device is never asked for a number and goes on with what was launched.
        """
        length, device = t.ids_BL.shape[1], t.row_M.device
        depth_P = torch.arange(self.shape.num_places)
        pos_BRP = anchor_BR[:, :, None] + depth_P
        start_B = length * torch.arange(len(anchor_BR))
        row_T = (start_B[:, None, None] + pos_BRP.clamp(max=length - 1)).flatten()
        is_inside = (pos_BRP < length) & is_there_BR[:, :, None]
        is_here_T = is_inside.flatten() & (place_T[row_T] >= 0)
        index_M = is_here_T.nonzero().squeeze(1)
        row_M, depth_M = row_T[index_M], depth_P.repeat(anchor_BR.numel())[index_M]
        weight_M = (-depth_M.float() / self.options.decay).exp()
        weight_M = weight_M / weight_M.sum().clamp(min=1e-6)
        at_M, index_M, row_M = (put(x, device) for x in (place_T[row_M], index_M, row_M))
        anchor_BR, weight_M = put(anchor_BR, device), put(weight_M, device)
        token_BR = t.ids_BL.gather(1, anchor_BR)
        assert body.mask_D is not None
        x = body.inputs(self.target.embed(token_BR.flatten()), body.mask_D)
        size = self.shape.num_places
        texts = BlocksOfTexts(context_TD, anchor_BR, size, self.rope)
        for source in self.sources:
            x = self.layer(x, source, texts)
        told_MD = body.telling(body.norm(x)).flatten(0, 1)[index_M]
        before_M = t.ids_BL.flatten()[row_M]
        assert body.markov is not None
        latent_MK = body.markov.latent(before_M, told_MD).to(told_MD.dtype)
        head = torch.cat((self.head_CD, body.markov.after.weight_NK), dim=1)
        state = torch.cat((told_MD, latent_MK), dim=1)
        loss, best_M = teach(state, head, t.p_MC[at_M], weight_M, self.options.loss, t.late)
        is_right_M = best_M == t.label_M[at_M]
        odds_M = body.confidences(before_M, told_MD)
        assert odds_M is not None
        sure_M = functional.binary_cross_entropy_with_logits(
            odds_M, is_right_M.float(), reduction="none"
        )
        for depth, grid_T in enumerate(agreed):
            of_depth = put((depth_M == depth).nonzero().squeeze(1), device)
            grid_T[row_M[of_depth]] = is_right_M[of_depth]
        return loss + (sure_M * weight_M).sum()

    def flops(self, outputs: TargetOutputs) -> float:
        inside = sum(t.numel() for n, t in self.tensors.items() if n.startswith("layers."))
        num_places = len(outputs.ids_BL) * self.options.anchors * self.shape.num_places
        head = len(self.columns) * (self.shape.spec.width + self.shape.markov_rank)
        fused = self.tensors["fc.weight"].numel() * outputs.batch.num_tokens
        return 6.0 * ((inside + head) * num_places + fused)

    def settled(self) -> dict[str, Any]:
        features = ",".join(map(str, self.feature_layers))
        return {"features": features, "rank": self.shape.markov_rank}

    def files(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        spec = self.shape.spec
        config = {
            "architectures": ["Qwen3DSparkModel"],
            "model_type": "qwen3",
            **layer_config(spec, self.config),
            "block_size": self.shape.num_places,
            "target_layer_ids": [layer - 1 for layer in self.feature_layers],
            "sample_from_anchor": True,
            "markov_rank": self.shape.markov_rank,
            "markov_head_type": "vanilla",
            "enable_confidence_head": True,
            "confidence_head_with_markov": True,
            UNITS: self.options.units,
        }
        tensors = {name: tensor.detach() for name, tensor in self.tensors.items()}
        if self.shape.num_columns:
            ids_C, order_C = self.columns.ids_C.cpu().sort()
            tensors["d2t"] = ids_C - torch.arange(len(ids_C))
            after = MARKOV.format(2)
            tensors[after] = tensors[after][order_C.to(tensors[after].device)]
            config["draft_vocab_size"] = len(ids_C)
        return config, tensors


def _features(text: str, num_layers: int) -> tuple[int, ...]:
    """Five of the target's layers, from the second to the one before the last."""
    if text:
        return read_features(text, num_layers)
    first, last = min(2, num_layers), max(num_layers - 2, 1)
    return tuple(sorted({round(first + i * (last - first) / 4) for i in range(5)}))


def _differences(spec: ModelSpec) -> list[str]:
    """What a target has that layers of Qwen3 have not: then none of its own are taken over."""
    found = {**unlike_llama(spec), **unlike_llama_inside(spec), "no gates": not spec.is_gated}
    return [name for name, is_there in found.items() if is_there]


def layers_of_its_own(spec: ModelSpec, num_layers: int) -> ModelSpec:
    """Layers of Qwen3 as wide as the target, for a target of another kind."""
    head_dim = 128 if spec.width % 128 == 0 and spec.width >= 1024 else 64
    num_heads = max(spec.width // head_dim, 1)
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.width,
        "intermediate_size": 3 * spec.width,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_heads // 4 if num_heads % 4 == 0 else num_heads,
        "head_dim": head_dim,
        "max_position_embeddings": spec.max_len,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0 if spec.rope is None else spec.rope.theta,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
    }
    return ModelSpec.from_config(config)


def _new_tensor(name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """A tensor of a layer that nothing is known of; at first the layer adds nothing."""
    if len(shape) == 1:
        return torch.ones(shape)
    if "o_proj" in name or "down_proj" in name:
        return torch.zeros(shape)
    found: Tensor = torch.randn(shape, generator=generator) * shape[1] ** -0.5
    return found


def _check(options: BlockOptions, spec: ModelSpec) -> None:
    if spec.embed_width not in (0, spec.width):
        raise UnsupportedModelError(
            f"train block: the target ({spec.architecture}) has a projected embedding, which "
            "training does not know yet; use a lookup method"
        )
    _features(options.features, spec.num_layers)


RECIPE = Recipe(
    options=BlockOptions,
    student=BlockStudent,
    check=_check,
    has_few_columns=True,
    drafts_as="dspark",
)
