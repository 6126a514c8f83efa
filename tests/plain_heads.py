"""The papers' formulas in plain torch over the published tensor names: a second opinion.

Nothing here comes from hunch. Tensors are a dict under a file's names, sequences have a batch in
front ([B, T, D]), everything can be differentiated, so the same code trains small heads for tests.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Tensors = dict[str, Tensor]
Config = dict[str, Any]


def rms(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return x if weight is None else x * weight


def rotate(x: Tensor, theta: float) -> Tensor:
    """[B, T, N, H] turned by positions 0 .. T-1."""
    half = x.shape[-1] // 2
    freq = theta ** -(torch.arange(half) / half)
    angle = torch.arange(x.shape[1])[:, None] * freq
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]
    left, right = x[..., :half], x[..., half:]
    return torch.cat([left * cos - right * sin, right * cos + left * sin], -1)


def layer(p: Tensors, prefix: str, c: Config, residual: Tensor, into: Tensor) -> Tensor:
    """A Llama layer whose attention reads `into` and whose sums start from `residual`."""
    heads, kv_heads = c["num_attention_heads"], c["num_key_value_heads"]
    size = c.get("head_dim") or c["hidden_size"] // heads
    eps, theta = c["rms_norm_eps"], c["rope_theta"]

    def project(name: str, x: Tensor) -> Tensor:
        return F.linear(x, p[f"{prefix}{name}.weight"], p.get(f"{prefix}{name}.bias"))

    q = project("self_attn.q_proj", into).unflatten(-1, (heads, size))
    k = project("self_attn.k_proj", into).unflatten(-1, (kv_heads, size))
    v = project("self_attn.v_proj", into).unflatten(-1, (kv_heads, size))
    if f"{prefix}self_attn.q_norm.weight" in p:
        q = rms(q, p[f"{prefix}self_attn.q_norm.weight"], eps)
        k = rms(k, p[f"{prefix}self_attn.k_norm.weight"], eps)
    q, k = rotate(q, theta), rotate(k, theta)
    k, v = (x.repeat_interleave(heads // kv_heads, dim=2) for x in (k, v))
    scores = torch.einsum("bqnh,bknh->bnqk", q, k) / math.sqrt(size)
    ahead = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    weights = scores.masked_fill(ahead, -torch.inf).softmax(-1)
    seen = torch.einsum("bnqk,bknh->bqnh", weights, v).flatten(-2)
    x = residual + project("self_attn.o_proj", seen)
    normed = rms(x, p[f"{prefix}post_attention_layernorm.weight"], eps)
    inner = F.silu(project("mlp.gate_proj", normed)) * project("mlp.up_proj", normed)
    return x + project("mlp.down_proj", inner)


class StepHead:
    """fuse: target states -> inputs; states: inputs and next tokens -> states; logits of states."""

    def __init__(self, p: Tensors, c: Config, embedding: Tensor, lm_head: Tensor) -> None:
        self.p, self.c, self.embedding, self.lm_head = p, c, embedding, lm_head
        self.ids: Tensor | None = None  # target's id of each column

    def fuse(self, hidden: Tensor, features: list[Tensor]) -> Tensor:
        return hidden

    def states(self, h: Tensor, following: Tensor) -> Tensor:
        raise NotImplementedError

    def logits(self, states: Tensor) -> Tensor:
        return states @ self.lm_head.T


class EagleHead(StepHead):
    """EAGLE-1: fc([emb(next); hidden]) -> one layer without an input norm."""

    def states(self, h: Tensor, following: Tensor) -> Tensor:
        p = self.p
        emb = F.embedding(following, p["embed_tokens.weight"])
        x = F.linear(torch.cat([emb, h], -1), p["fc.weight"], p.get("fc.bias"))
        return layer(p, "layers.0.", self.c, x, x)


class Eagle3Head(StepHead):
    """EAGLE-3, and its 3.1 norms; `first` is the name of the first layer in the file."""

    def __init__(self, *args: Any, first: str = "midlayer.", **flags: bool) -> None:
        super().__init__(*args)
        self.first, self.flags = first, flags
        if "d2t" in self.p:
            self.ids = torch.arange(len(self.p["d2t"])) + self.p["d2t"]

    def fuse(self, hidden: Tensor, features: list[Tensor]) -> Tensor:
        p, eps = self.p, self.c["rms_norm_eps"]
        if self.flags.get("fc_norm"):
            features = [rms(x, p[f"fc_norm.{i}.weight"], eps) for i, x in enumerate(features)]
        x = torch.cat(features, -1)
        if self.flags.get("norm_before_fc"):
            x = rms(x, p["input_norm.weight"], eps)
        return x @ p["fc.weight"].T

    def states(self, h: Tensor, following: Tensor) -> Tensor:
        p, c, first, eps = self.p, self.c, self.first, self.c["rms_norm_eps"]
        emb = F.embedding(following, p.get("embed_tokens.weight", self.embedding))
        normed = rms(h, p[f"{first}hidden_norm.weight"], eps)
        into = torch.cat([rms(emb, p[f"{first}input_layernorm.weight"], eps), normed], -1)
        residual = normed if self.flags.get("norm_before_residual") else h
        x = layer(p, first, c, residual, into)
        for i in range(1, c.get("num_hidden_layers", 1)):
            name = f"layers.{i}."
            x = layer(p, name, c, x, rms(x, p[f"{name}input_layernorm.weight"], eps))
        return rms(x, p["norm.weight"], eps) if self.flags.get("norm_output") else x

    def logits(self, states: Tensor) -> Tensor:
        if not self.flags.get("norm_output"):
            states = rms(states, self.p["norm.weight"], self.c["rms_norm_eps"])
        return states @ self.p["lm_head.weight"].T


class MtpHead(StepHead):
    """DeepSeek's, MiMo's and Qwen3-Next's MTP layer, by the names of its parts."""

    def __init__(
        self,
        *args: Any,
        names: tuple[str, str, str, str],
        layer: str,
        is_reversed: bool = False,
        is_masked: bool = False,
    ) -> None:
        super().__init__(*args)
        self.names, self.layer = names, layer
        self.is_reversed, self.is_masked = is_reversed, is_masked

    def states(self, h: Tensor, following: Tensor) -> Tensor:
        p, eps = self.p, self.c["rms_norm_eps"]
        token_norm, state_norm, project, norm = self.names
        emb = F.embedding(following, self.embedding)
        if self.is_masked:
            emb = torch.cat([torch.zeros_like(emb[:, :1]), emb[:, 1:]], 1)
        pair = [rms(emb, p[f"{token_norm}.weight"], eps), rms(h, p[f"{state_norm}.weight"], eps)]
        x = torch.cat(pair[::-1] if self.is_reversed else pair, -1) @ p[f"{project}.weight"].T
        into = rms(x, p[f"{self.layer}input_layernorm.weight"], eps)
        return rms(layer(p, self.layer, self.c, x, into), p[f"{norm}.weight"], eps)


class MlpHead:
    """The MLP speculator, stage by stage."""

    def __init__(self, p: Tensors, c: Config) -> None:
        self.p, self.c = p, c

    def logits(self, hidden: Tensor, tokens: list[Tensor]) -> list[Tensor]:
        """Scores of each stage, fed with the tokens before it."""
        p, c = self.p, self.c
        n, inner = c["n_predict"], c["inner_dim"]
        state_weight = 0.5 ** (0.5 / n)
        emb_weight = math.sqrt((1 - state_weight**2) * inner / 2)
        state = rms(hidden, None, 1e-6) / math.sqrt(2) if c.get("scale_input") else hidden
        found = []
        for i, token in enumerate(tokens):
            at = {"emb": i, "proj": i, "ln": i, "head": i}
            if c.get("tie_weights"):
                at = {"emb": 0, "proj": min(i, 1), "ln": 0, "head": 0}
            state = state @ p[f"speculator.proj.{at['proj']}.weight"].T
            emb = F.embedding(token, p[f"speculator.emb.{at['emb']}.weight"])
            state = state + emb * (emb_weight / state_weight)
            normed = rms(state, p[f"speculator.ln.{at['ln']}.weight"], 1e-6)
            state = F.gelu(normed + p[f"speculator.ln.{at['ln']}.bias"])
            found.append(state @ p[f"speculator.head.{at['head']}.weight"].T)
        return found


class MedusaHead:
    """Medusa's heads; `names(h)` gives the residual layer and the output matrix of head h."""

    def __init__(self, p: Tensors, names: Callable[[int], tuple[str, str]], num_heads: int) -> None:
        self.p, self.names, self.num_heads = p, names, num_heads

    def logits(self, hidden: Tensor) -> list[Tensor]:
        found = []
        for head in range(self.num_heads):
            block, output = self.names(head)
            inner = F.linear(hidden, self.p[f"{block}.weight"], self.p.get(f"{block}.bias"))
            found.append((hidden + F.silu(inner)) @ self.p[output].T)
        return found


def replay(head: StepHead, h: Tensor, tokens: list[int], known: int, depth: int) -> list[int]:
    """The greedy chain a step head drafts once `known` tokens are decided. h: [T, D] inputs."""
    chain: list[int] = []
    h = h[: known - 1]
    following = list(tokens[1:known])
    for _ in range(depth):
        states = head.states(h[None], torch.tensor(following)[None])[0]
        best = int(head.logits(states[-1]).argmax())
        chain.append(best if head.ids is None else int(head.ids[best]))
        h = torch.cat([h, states[-1:]])
        following.append(chain[-1])
    return chain
