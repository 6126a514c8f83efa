"""Small drafters in every published file form, trained for a second on their target's own text."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

import plain_blocks
import plain_heads
from builders import BLOCK_SIZE, Seq, new_kv, pack, tables
from hunch import LLM, SamplingParams
from hunch.layers.attention import Heads, split_heads
from hunch.layers.rope import Rope
from hunch.models.decoder import Decoder
from hunch.models.heads.block import BlockBody, build_body
from hunch.models.heads.block_files import load_block
from hunch.models.heads.block_net import attend_dense, seen_from
from hunch.models.load import load_decoder
from hunch.models.spec import ModelSpec
from hunch.models.weights import open_weights
from hunch.train.student import Masters
from random_models import random_model

MTP_NAMES = {
    "mimo": ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm"),
    "qwen": ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm"),
    "deepseek": ("enorm", "hnorm", "eh_proj", "shared_head.norm"),
}
MTP_PREFIX = {"mimo": "model.mtp_layers.0.", "qwen": "mtp.", "deepseek": "model.layers.2."}
MTP_LAYER = {**MTP_PREFIX, "qwen": "mtp.layers.0."}


@dataclass
class Study:
    """A target, texts of its own making, and its states on them."""

    target: Decoder
    tokens: Tensor  # [B, T]
    hidden: Tensor  # [B, T, D]
    features: list[Tensor]  # after layers 0, 1, ... each [B, T, D]

    @staticmethod
    def random(length: int, width: int) -> Study:
        """A random Llama of two layers, with a random text and random states."""
        config = {
            "architectures": ["LlamaForCausalLM"],
            "vocab_size": 60,
            "hidden_size": width,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
        }
        generator = torch.Generator().manual_seed(1)
        tokens = torch.randint(60, (1, length), generator=generator)
        hidden = torch.randn(1, length, width, generator=generator)
        return Study(random_model(ModelSpec.from_config(config)), tokens, hidden, [])

    @property
    def width(self) -> int:
        return self.target.spec.width

    @property
    def vocab_size(self) -> int:
        return self.target.spec.vocab_size

    @property
    def embedding(self) -> Tensor:
        return self.target.embedding_VD

    @property
    def lm_head(self) -> Tensor:
        return self.target.head.weight_NK


def states_of(target: Decoder, tokens: list[int]) -> tuple[Tensor, list[Tensor]]:
    """Last states and all features of one sequence, from one pass."""
    num_blocks = -(-len(tokens) // BLOCK_SIZE)
    ids_T, attn = pack([Seq(tokens)], tables(1, num_blocks))
    every = tuple(range(target.spec.num_layers + 1))
    hidden = target.forward(ids_T, attn, new_kv(target, 1, num_blocks), every)
    return hidden.last_TD, list(hidden.features)


def study(path: Path, prompts: Sequence[str] = (), num_texts: int = 8, length: int = 40) -> Study:
    """The target of `path` answers prompts, random ones unless given; its thoughts are kept."""
    target = load_decoder(open_weights(path), dtype="float32")
    generator = torch.Generator().manual_seed(5)
    size = target.spec.vocab_size - 1
    asked = list(prompts) or torch.randint(size, (num_texts, 6), generator=generator).tolist()
    with LLM(str(path), speculate="off", max_model_len=256, kv_bytes=8_000_000) as llm:
        params = SamplingParams(temperature=0, max_tokens=length, ignore_eos=True)
        outputs = llm.generate(asked, params)
    texts = [[*output.prompt_token_ids, *output.outputs[0].token_ids] for output in outputs]
    texts = [text[: min(map(len, texts))] for text in texts]
    with torch.no_grad():
        states = [states_of(target, text) for text in texts]
    features = [torch.stack([s[1][i] for s in states]) for i in range(len(states[0][1]))]
    return Study(target, torch.tensor(texts), torch.stack([s[0] for s in states]), features)


def normal(*shape: int, seed: int, scale: float = 1.0) -> Tensor:
    noise = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    return noise * scale / shape[-1] ** 0.5


def layer_tensors(prefix: str, c: dict[str, Any], into: int, seed: int) -> dict[str, Tensor]:
    width, inner = c["hidden_size"], c["intermediate_size"]
    size = c["head_dim"]
    q, kv = c["num_attention_heads"] * size, c["num_key_value_heads"] * size
    shapes = {
        "self_attn.q_proj": (q, into),
        "self_attn.k_proj": (kv, into),
        "self_attn.v_proj": (kv, into),
        "self_attn.o_proj": (width, q),
        "mlp.gate_proj": (inner, width),
        "mlp.up_proj": (inner, width),
        "mlp.down_proj": (width, inner),
    }
    tensors = {
        f"{prefix}{name}.weight": normal(*shape, seed=seed + i)
        for i, (name, shape) in enumerate(shapes.items())
    }
    for i, name in enumerate(("input_layernorm", "post_attention_layernorm")):
        tensors[f"{prefix}{name}.weight"] = 1 + normal(width, seed=seed + 20 + i)
    return tensors


def layer_config(s: Study, **more: Any) -> dict[str, Any]:
    return {
        "vocab_size": s.vocab_size,
        "hidden_size": s.width,
        "intermediate_size": 2 * s.width,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,  # a width that the CPU's own kernels take
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        **more,
    }


def write(path: Path, config: dict[str, Any], tensors: dict[str, Tensor], name: str = "") -> Path:
    """As safetensors, or as a torch file where its name ends so."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    stored = {key: value.detach().clone().contiguous() for key, value in tensors.items()}
    if name.endswith((".bin", ".pt")):
        torch.save(stored, path / name)
    else:
        save_file(stored, path / (name or "model.safetensors"))
    return path


def fit(tensors: dict[str, Tensor], loss: Any, num_steps: int = 40, lr: float = 0.01) -> None:
    """Gradient descent on every float tensor, in place."""
    learned = [t.requires_grad_() for t in tensors.values() if t.is_floating_point()]
    optimiser = torch.optim.Adam(learned, lr=lr)
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # products this small only lose by sharing
    try:
        for _ in range(num_steps):
            optimiser.zero_grad()
            loss().backward()
            optimiser.step()
    finally:
        torch.set_num_threads(num_threads)
    for tensor in learned:
        tensor.requires_grad_(False)


def step_loss(head: plain_heads.StepHead, s: Study, features: list[Tensor]) -> Any:
    """State t and token t + 1 should tell token t + 2; the second step feeds its own states."""
    columns = torch.full((s.vocab_size,), -100)
    ids = torch.arange(s.vocab_size) if head.ids is None else head.ids
    columns[ids] = torch.arange(len(ids))

    def loss() -> Tensor:
        h = head.fuse(s.hidden, features)
        total = torch.zeros(())
        for ahead in (1, 2):
            following = s.tokens[:, ahead : s.tokens.shape[1] - 1]
            states = head.states(h[:, : following.shape[1]], following)
            wanted = columns[s.tokens[:, ahead + 1 :]]
            logits = head.logits(states).flatten(0, 1)
            total = total + F.cross_entropy(logits, wanted.flatten(), ignore_index=-100)
            h = states
        return total

    return loss


def make_eagle(s: Study, path: Path, *, num_steps: int = 40, **more: Any) -> plain_heads.EagleHead:
    c = layer_config(s, architectures=["LlamaForCausalLM"], bias=False, **more)
    tensors = {
        "embed_tokens.weight": s.embedding.clone(),
        "fc.weight": normal(s.width, 2 * s.width, seed=1),
        "fc.bias": normal(s.width, seed=2, scale=0.1),
        **layer_tensors("layers.0.", c, s.width, 10),
    }
    del tensors["layers.0.input_layernorm.weight"]
    head = plain_heads.EagleHead(tensors, c, s.embedding, s.lm_head)
    fit(tensors, step_loss(head, s, []), num_steps)
    write(path, c, tensors, "pytorch_model.bin")
    return head


def make_eagle3(
    s: Study,
    path: Path,
    *,
    is_speculators: bool = False,
    draft_vocab: int | None = None,
    layers: tuple[int, ...] | None = None,
    num_layers: int = 1,
    num_steps: int = 40,
    **flags: bool,
) -> tuple[plain_heads.Eagle3Head, list[Tensor]]:
    """The head, and the features it fuses."""
    first = "layers.0." if is_speculators else "midlayer."
    c = layer_config(s, num_hidden_layers=num_layers)
    count = s.target.spec.num_layers
    layers = layers if layers is not None else (min(2, count), count // 2, max(count - 3, 0))
    columns = draft_vocab or s.vocab_size
    kept = s.tokens.flatten().bincount(minlength=s.vocab_size).argsort(descending=True)[:columns]
    kept = kept.sort().values
    tensors = {
        "d2t": kept - torch.arange(columns),
        "t2d": torch.zeros(s.vocab_size, dtype=torch.bool).index_fill(0, kept, True),
        "fc.weight": normal(s.width, len(layers) * s.width, seed=1),
        "norm.weight": torch.ones(s.width),
        "lm_head.weight": s.lm_head[kept].clone(),
        f"{first}hidden_norm.weight": torch.ones(s.width),
        **layer_tensors(first, c, 2 * s.width, 10),
    }
    for i in range(1, num_layers):
        tensors |= layer_tensors(f"layers.{i}.", c, s.width, 40 * i)
    if flags.get("norm_before_fc"):
        tensors["input_norm.weight"] = 1 + normal(len(layers) * s.width, seed=3)
    if flags.get("fc_norm"):
        for i in range(len(layers)):
            tensors[f"fc_norm.{i}.weight"] = 1 + normal(s.width, seed=4 + i)
    head = plain_heads.Eagle3Head(tensors, c, s.embedding, s.lm_head, first=first, **flags)
    features = [s.features[layer] for layer in layers]
    fit(tensors, step_loss(head, s, features), num_steps)
    common = {"draft_vocab_size": columns, "eagle_aux_hidden_state_layer_ids": list(layers)}
    if is_speculators:
        config = {
            "architectures": ["Eagle3Speculator"],
            "speculators_model_type": "eagle3",
            "speculators_version": "0.9.0",
            "norm_before_residual": False,
            **common,
            **flags,
            "transformer_layer_config": {"model_type": "llama", **c},
            "speculators_config": {
                "algorithm": "eagle3",
                "default_proposal_method": "greedy",
                "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
                "verifier": {"name_or_path": None, "architectures": ["LlamaForCausalLM"]},
            },
        }
    else:
        config = {**c, "architectures": ["LlamaForCausalLMEagle3"], **common, **flags}
    write(path, config, tensors)
    return head, features


def make_mtp(s: Study, path: Path, form: str = "mimo", *, num_steps: int = 40) -> Any:
    c = layer_config(s, num_nextn_predict_layers=1)
    prefix, layer = MTP_PREFIX[form], MTP_LAYER[form]
    token_norm, state_norm, project, norm = (prefix + name for name in MTP_NAMES[form])
    tensors = {
        f"{token_norm}.weight": torch.ones(s.width),
        f"{state_norm}.weight": torch.ones(s.width),
        f"{project}.weight": normal(s.width, 2 * s.width, seed=1),
        f"{norm}.weight": torch.ones(s.width),
        **layer_tensors(layer, c, s.width, 10),
    }
    head = plain_heads.MtpHead(
        tensors,
        c,
        s.embedding,
        s.lm_head,
        names=(token_norm, state_norm, project, norm),
        layer=layer,
        is_reversed=form == "mimo",
        is_masked=form == "deepseek",
    )
    fit(tensors, step_loss(head, s, []), num_steps)
    write(path, c, tensors)
    return head


def make_mlp(s: Study, path: Path, *, num_steps: int = 40, **more: Any) -> plain_heads.MlpHead:
    c = {
        "architectures": ["MLPSpeculatorPreTrainedModel"],
        "model_type": "mlp_speculator",
        "emb_dim": s.width,
        "inner_dim": 24,
        "n_predict": 3,
        "vocab_size": s.vocab_size,
        "top_k_tokens_per_head": [4, 3, 2],
        **more,
    }
    inner, is_tied = c["inner_dim"], c.get("tie_weights")
    tensors: dict[str, Tensor] = {}
    for i in range(c["n_predict"]):
        if i == 0 or not is_tied:
            tensors |= {
                f"speculator.emb.{i}.weight": normal(s.vocab_size, inner, seed=10 + i),
                f"speculator.head.{i}.weight": normal(s.vocab_size, inner, seed=20 + i),
                f"speculator.ln.{i}.weight": torch.ones(inner),
                f"speculator.ln.{i}.bias": torch.zeros(inner),
            }
        if i < 2 or not is_tied:
            into = inner if i else s.width
            tensors[f"speculator.proj.{i}.weight"] = normal(inner, into, seed=30 + i)
    head = plain_heads.MlpHead(tensors, c)

    def loss() -> Tensor:
        n, length = c["n_predict"], s.tokens.shape[1]
        fed = [s.tokens[:, 1 + i : length - n + i] for i in range(n)]
        wanted = [s.tokens[:, 2 + i : length - n + 1 + i] for i in range(n)]
        logits = head.logits(s.hidden[:, : length - n - 1], fed)
        pairs = zip(logits, wanted, strict=True)
        return sum(F.cross_entropy(x.flatten(0, 1), y.flatten()) for x, y in pairs)

    fit(tensors, loss, num_steps)
    write(path, c, tensors)
    return head


def make_medusa(
    s: Study, path: Path, form: str = "new", *, num_heads: int = 3, num_steps: int = 40
) -> plain_heads.MedusaHead:
    def names(head: int) -> tuple[str, str]:
        if form == "old":
            return f"{head}.0.linear", f"{head}.1.weight"
        return f"blocks.{head}.layers.0", f"lm_heads.{head}.weight"

    tensors: dict[str, Tensor] = {}
    for head in range(num_heads):
        block, output = names(head)
        tensors[f"{block}.weight"] = normal(s.width, s.width, seed=head)
        tensors[output] = s.lm_head.clone()
        if form == "old":
            tensors[f"{block}.bias"] = torch.zeros(s.width)
    net = plain_heads.MedusaHead(tensors, names, num_heads)

    def loss() -> Tensor:
        total = torch.zeros(())
        for head, logits in enumerate(net.logits(s.hidden[:, : -2 - num_heads])):
            wanted = s.tokens[:, 2 + head : s.tokens.shape[1] - num_heads + head]
            total = total + F.cross_entropy(logits.flatten(0, 1), wanted.flatten())
        return total

    fit(tensors, loss, num_steps)
    if form == "old":
        config = {"medusa_num_heads": 2, "medusa_num_layers": 1, "base_model_name_or_path": "x"}
        write(path, config, tensors, "medusa_lm_head.pt")
    else:
        config = {
            "model_type": "medusa",
            "architectures": ["MedusaModel"],
            "hidden_size": s.width,
            "vocab_size": s.vocab_size,
            "num_heads": num_heads,
            "num_hidden_layers": 1,
        }
        write(path, config, tensors)
    return net


def make_draft(target: Path, path: Path, noise: float = 0.0) -> Path:
    """A copy of the target, exact or slightly off."""
    path.mkdir(parents=True, exist_ok=True)
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (path / name).write_bytes((target / name).read_bytes())
    tensors = load_file(target / "model.safetensors")
    generator = torch.Generator().manual_seed(1)
    for name, tensor in tensors.items():
        spread = tensor.std() if tensor.dim() > 1 else 0.0
        tensors[name] = tensor + noise * spread * torch.randn(tensor.shape, generator=generator)
    save_file(tensors, path / "model.safetensors")
    return path


def cut_vocab(path: Path, count: int) -> None:
    """Take the last rows of a model's tables away, as a family's smaller models have fewer."""
    config = json.loads((path / "config.json").read_text())
    size = config["vocab_size"]
    config["vocab_size"] = size - count
    (path / "config.json").write_text(json.dumps(config))
    tensors = load_file(path / "model.safetensors")
    tensors = {
        name: tensor[: size - count].contiguous() if tensor.shape[0] == size else tensor
        for name, tensor in tensors.items()
    }
    save_file(tensors, path / "model.safetensors")


def shuffle_vocab(path: Path) -> None:
    """Renumber a model's tokens: the same function under other ids."""
    content = json.loads((path / "tokenizer.json").read_text())
    vocab = content["model"]["vocab"]
    order = torch.randperm(len(vocab), generator=torch.Generator().manual_seed(2)).tolist()
    content["model"]["vocab"] = {token: order[number] for token, number in vocab.items()}
    (path / "tokenizer.json").write_text(json.dumps(content))
    tensors = load_file(path / "model.safetensors")
    rows = torch.tensor(order)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        tensors[name][rows] = tensors[name][: len(rows)].clone()
    save_file(tensors, path / "model.safetensors")


def look_less_far(path: Path) -> None:
    """Weaken a model's attention: what it says then hangs on its last tokens almost alone."""
    tensors = load_file(path / "model.safetensors")
    for name in tensors:
        if "o_proj" in name:
            tensors[name] = tensors[name] * 0.02
    save_file(tensors, path / "model.safetensors")


BLOCK_NAMES = {"dflash": "DFlashDraftModel", "dspark": "Qwen3DSparkModel"}


def block_tensors(
    s: Study, c: dict[str, Any], num_taps: int, *, rank: int = 0, is_gated: bool = False
) -> dict[str, Tensor]:
    """Random tensors of DFlash's form; with a rank, DSpark's heads."""
    width, size = s.width, c["head_dim"]
    tensors = {
        "fc.weight": normal(width, num_taps * width, seed=1),
        "hidden_norm.weight": 1 + normal(width, seed=2),
        "norm.weight": 1 + normal(width, seed=3),
    }
    for i in range(c["num_hidden_layers"]):
        tensors |= layer_tensors(f"layers.{i}.", c, width, 40 * i + 40)
        for j, which in enumerate(("q_norm", "k_norm")):
            norm = 1 + normal(size, seed=40 * i + 70 + j)
            tensors[f"layers.{i}.self_attn.{which}.weight"] = norm
    if rank:
        tensors |= {
            "markov_head.markov_w1.weight": normal(s.vocab_size, rank, seed=5),
            "markov_head.markov_w2.weight": normal(s.vocab_size, rank, seed=6),
            "confidence_head.proj.weight": normal(1, width + rank, seed=7),
            "confidence_head.proj.bias": torch.zeros(1),
        }
    if is_gated:
        tensors["markov_head.gate_proj.weight"] = normal(rank, width + rank, seed=8)
        tensors["markov_head.gate_proj.bias"] = normal(rank, seed=9)
    return tensors


def conv_tensors(
    s: Study, c: dict[str, Any], taps: int, group: int, rank: int
) -> dict[str, Tensor]:
    """What DFlash2 has beyond DFlash."""
    width, tensors = s.width, {}
    for i in range(c["num_hidden_layers"]):
        for j, part in enumerate(("attention", "mlp")):
            name = f"layers.{i}.{part}_conv"
            base = normal(2, taps, width, seed=500 + 10 * i + j, scale=0.3 * width**0.5)
            base[:, 0] += 1
            tensors[f"{name}.base_kernel"] = base
            shape = (2 * taps * (width // group), width)
            tensors[f"{name}.kernel_projection.weight"] = normal(*shape, seed=600 + 10 * i + j)
    for j, name in enumerate(("predecessor_codebook", "successor_codebook")):
        codes = normal(s.vocab_size, rank, seed=700 + j, scale=2.0 * rank**0.5)
        tensors[f"candidate_selector.{name}"] = codes
    tensors["candidate_selector.hidden_projection.weight"] = normal(rank, width, seed=710)
    return tensors


class TaughtBlocks:
    """Blocks anywhere in one known text, as they are taught: each sees the text before its anchor.

    >>> context_TD = body.context(features)                 # the text's states, T positions
    >>> attend = TaughtBlocks(body, context_TD, anchor_R, rope)
    >>> states_TD = body.states(body.inputs(embed_RD, mask_D), attend)
    >>> told_RSD = body.telling(states_TD)                  # what the S places say

    anchor_R: the position of each block's first token; its embedding is embed_RD, and it sees the
    states of positions before it. Place i of block r then stands at anchor_R[r] + i. The token
    before place s that tells something is that at anchor_R[r] + s, shifted or not.
    """

    def __init__(self, body: BlockBody, context_TD: Tensor, anchor_R: Tensor, table: Rope) -> None:
        self.shape, device = body.shape, context_TD.device
        num_known, size = len(context_TD), body.shape.num_places
        pos_L = torch.arange(num_known, device=device)
        pos_T = (anchor_R[:, None] + torch.arange(size, device=device)).flatten()
        self.rotation, self.kv = table(pos_T), body.context_kv(context_TD, table(pos_L))
        block_T = torch.arange(len(anchor_R), device=device).repeat_interleave(size)
        is_before_TL = pos_L[None, :] < anchor_R.repeat_interleave(size)[:, None]
        is_own_TT = block_T[:, None] == block_T[None, :]
        self.is_seen_TK = torch.cat((is_before_TL, is_own_TT), dim=1)
        self.pos_T, self.pos_K = pos_T, torch.cat((pos_L, pos_T))

    def __call__(
        self, qkv_TAH: Tensor, heads: Heads, layer: int, sinks_N: Tensor | None = None
    ) -> Tensor:
        q_TNH, k_TMH, v_TMH = split_heads(qkv_TAH, heads, self.rotation)
        k_LMH, v_LMH = self.kv[layer]
        is_seen_TK = self.is_seen_TK
        near_TK = seen_from(self.pos_T, self.pos_K, heads.window, self.shape.is_causal)
        if near_TK is not None:
            is_seen_TK = is_seen_TK & near_TK
        keys, values = torch.cat((k_LMH, k_TMH)), torch.cat((v_LMH, v_TMH))
        return attend_dense(q_TNH, keys, values, is_seen_TK, heads)


def make_block(
    s: Study, path: Path, method: str = "dspark", *, num_steps: int = 80, **more: Any
) -> plain_blocks.PlainBlocks:
    """A block drafter that knows its target's texts by heart."""
    layers = list(range(s.target.spec.num_layers))
    is_shifted = method == "dspark"
    own = {"block_size": 4, "mask_token_id": s.vocab_size - 1, "target_layer_ids": layers}
    c = layer_config(s, architectures=[BLOCK_NAMES[method]], **own, **more)
    tensors = block_tensors(s, c, len(layers), rank=16 if is_shifted else 0)
    plain = plain_blocks.PlainBlocks(tensors, c, s.embedding, s.lm_head, is_shifted)
    write(path, c, tensors)
    net = load_block(path, s.target, method)  # for its shape: what is learned are the tensors
    learned = {name: tensor.clone() for name, tensor in tensors.items()}
    source = Masters(learned, torch.float32, torch.device("cpu"))
    turn = iter(range(10**9))

    def loss() -> Tensor:
        body, text = build_body(net.shape, source), next(turn) % len(s.tokens)
        tokens = s.tokens[text]
        anchors = torch.arange(1, len(tokens) - net.shape.num_tokens)
        context = body.context([s.features[layer][text] for layer in net.feature_layers])
        attend = TaughtBlocks(body, context, anchors, net.rope)
        x = body.inputs(s.embedding[tokens[anchors]], net.mask_D)
        told = body.telling(body.states(x, attend))
        before = (anchors[:, None] + torch.arange(told.shape[1])).flatten()
        told = told.flatten(0, 1)
        logits = body.scores(body.scaled(told @ s.lm_head.T), tokens[before], told)
        total = F.cross_entropy(logits, tokens[before + 1])
        odds = body.confidences(tokens[before], told)
        if odds is not None:
            is_right = (logits.argmax(-1) == tokens[before + 1]).float()
            total = total + F.binary_cross_entropy_with_logits(odds, is_right)
        return total

    fit(learned, loss, num_steps)
    tensors.update(learned)
    write(path, c, tensors)
    return plain


def make_dflash(s: Study, path: Path, **more: Any) -> plain_blocks.PlainBlocks:
    return make_block(s, path, "dflash", **more)


def make_dspark(s: Study, path: Path, **more: Any) -> plain_blocks.PlainBlocks:
    return make_block(s, path, "dspark", **more)


def make_dflash2(s: Study, path: Path, **more: Any) -> plain_blocks.PlainBlocks:
    """DFlash that knows its texts, with convolutions and pair scores that change little."""
    plain = make_block(s, path, "dflash", **more)
    c, tensors = plain.c, plain.t
    tensors |= {
        name: tensor * 0.02 if not name.endswith("base_kernel") else tensor.round()
        for name, tensor in conv_tensors(s, c, taps=2, group=16, rank=4).items()
    }
    c |= {"architectures": ["DFlash2DraftModel"], "conv_group_size": 16, "selector_top_k": 8}
    plain.own |= c
    write(path, c, tensors)
    return plain
