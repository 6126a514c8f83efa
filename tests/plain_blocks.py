"""Block drafters written down plainly, from what is published of them; hunch's are held to this.

Nothing of hunch is used: tensors by their published names, config keys by theirs.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


class PlainBlocks:
    """DFlash, DSpark or DFlash2 over one text: blocks at any anchors, each in a pass of its own.

    `taps` are the target's states, [T, n * width]; `embedding` and `lm_head` the target's.
    """

    def __init__(
        self,
        tensors: dict[str, Tensor],
        config: dict[str, Any],
        embedding: Tensor,
        lm_head: Tensor,
        is_shifted: bool,
        is_causal: bool = True,  # in sliding layers
    ) -> None:
        self.t, self.c, self.embedding = tensors, config, embedding
        self.is_shifted, self.is_causal = is_shifted, is_causal
        self.lm_head = tensors.get("lm_head.weight", lm_head)
        self.own = {**config, **config.get("dflash_config", {})}
        self.size, self.eps = self.own["block_size"], config["rms_norm_eps"]
        self.ids = None  # the target's id of each column
        if "d2t" in tensors:
            self.ids = torch.arange(len(tensors["d2t"])) + tensors["d2t"]

    def turned(self, x: Tensor, positions: Tensor) -> Tensor:
        """Rotary embedding of x [..., T, heads, d]."""
        d = x.shape[-1]
        angle = positions[:, None] / self.c["rope_theta"] ** (torch.arange(0, d, 2) / d)
        cos, sin = angle.cos()[:, None], angle.sin()[:, None]
        a, b = x[..., : d // 2], x[..., d // 2 :]
        return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)

    def heads(self, x: Tensor, layer: int, which: str, positions: Tensor) -> Tensor:
        name = f"layers.{layer}.self_attn."
        out = x @ self.t[f"{name}{which}_proj.weight"].T
        out = out.view(len(x), -1, self.c["head_dim"])
        if which == "v":
            return out
        if f"{name}{which}_norm.weight" in self.t:
            out = rms(out, self.t[f"{name}{which}_norm.weight"], self.eps)
        return self.turned(out, positions)

    def conv(self, x: Tensor, taps: Tensor, name: str, side: int) -> Tensor:
        """Along the block: tap w looks w places back, nothing before the block."""
        base, group = self.t[f"{name}.base_kernel"][side], self.own["conv_group_size"]
        num_taps = len(base)
        dynamic = taps.view(len(x), 2, num_taps, -1)[:, side].repeat_interleave(group, -1)
        out = torch.zeros_like(x)
        for place in range(len(x)):
            for w in range(min(num_taps, place + 1)):
                out[place] = out[place] + (base[w] + dynamic[place, w]) * x[place - w]
        return out

    def states(self, taps: Tensor, anchor: int, token: int) -> Tensor:
        """States of the block whose first token stands at `anchor`, [size, width]."""
        t, c = self.t, self.c
        context = rms(taps[:anchor] @ t["fc.weight"].T, t["hidden_norm.weight"], self.eps)
        places = torch.arange(anchor, anchor + self.size)
        positions = torch.arange(anchor + self.size)
        mask = t.get("mask_embedding")
        if mask is None:
            mask = self.embedding[self.own["mask_token_id"]]
        x = torch.stack([self.embedding[token], *[mask] * (self.size - 1)])
        x = x * self.own.get("input_embedding_scale", 1.0)
        for layer in range(c["num_hidden_layers"]):
            name = f"layers.{layer}."
            h = rms(x, t[f"{name}input_layernorm.weight"], self.eps)
            has_conv = f"{name}attention_conv.base_kernel" in t
            if has_conv:
                taps_a = h @ t[f"{name}attention_conv.kernel_projection.weight"].T
                h = self.conv(h, taps_a, f"{name}attention_conv", 0)
            q = self.heads(h, layer, "q", places)
            both = [
                torch.cat(
                    (
                        self.heads(context, layer, which, positions[:anchor]),
                        self.heads(h, layer, which, places),
                    )
                )
                for which in "kv"
            ]
            group = c["num_attention_heads"] // c["num_key_value_heads"]
            k, v = (one.repeat_interleave(group, dim=1) for one in both)
            scores = torch.einsum("qnd,knd->nqk", q, k) * c["head_dim"] ** -0.5
            if c.get("layer_types", ["full_attention"] * 9)[layer] == "sliding_attention":
                back = places[:, None] - positions[None, :]
                hidden = back.abs() >= c["sliding_window"]
                if self.is_causal:
                    hidden = hidden | (back < 0)
                scores = scores.masked_fill(hidden, -torch.inf)
            read = torch.einsum("nqk,knd->qnd", scores.softmax(-1), v).flatten(1)
            y = read @ t[f"{name}self_attn.o_proj.weight"].T
            x = x + (self.conv(y, taps_a, f"{name}attention_conv", 1) if has_conv else y)
            h = rms(x, t[f"{name}post_attention_layernorm.weight"], self.eps)
            if has_conv:
                taps_m = h @ t[f"{name}mlp_conv.kernel_projection.weight"].T
                h = self.conv(h, taps_m, f"{name}mlp_conv", 0)
            gate = F.silu(h @ t[f"{name}mlp.gate_proj.weight"].T)
            y = (gate * (h @ t[f"{name}mlp.up_proj.weight"].T)) @ t[f"{name}mlp.down_proj.weight"].T
            x = x + (self.conv(y, taps_m, f"{name}mlp_conv", 1) if has_conv else y)
        return rms(x, t["norm.weight"], self.eps)

    def told(self, taps: Tensor, anchor: int, token: int) -> Tensor:
        """States of the places that tell the tokens after the anchor, in order."""
        states = self.states(taps, anchor, token)
        return states if self.is_shifted else states[1:]

    def logits(self, state: Tensor, before: int) -> Tensor:
        """Of one place, given the token before the one it tells."""
        logits = (state @ self.lm_head.T) * self.own.get("output_multiplier", 1.0)
        cap = self.own.get("final_logit_softcapping")
        if cap:
            logits = torch.tanh(logits / cap) * cap
        if "markov_head.markov_w1.weight" in self.t:
            latent = self.t["markov_head.markov_w1.weight"][before]
            if "markov_head.gate_proj.weight" in self.t:
                gate = torch.cat((state, latent)) @ self.t["markov_head.gate_proj.weight"].T
                latent = latent * torch.sigmoid(gate + self.t["markov_head.gate_proj.bias"])
            logits = logits + latent @ self.t["markov_head.markov_w2.weight"].T
        if "candidate_selector.predecessor_codebook" in self.t:
            top = logits.topk(self.own["selector_top_k"])
            name = "candidate_selector."
            pair = self.t[f"{name}predecessor_codebook"][before] * (
                self.t[f"{name}hidden_projection.weight"] @ state
            )
            edge = self.t[f"{name}successor_codebook"][top.indices] @ pair
            logits = torch.full_like(logits, -torch.inf).index_copy(
                0, top.indices, top.values + edge
            )
        return logits

    def confidence(self, state: Tensor, before: int) -> Tensor:
        weight, bias = (self.t[f"confidence_head.proj.{part}"] for part in ("weight", "bias"))
        if weight.shape[1] > len(state):
            state = torch.cat((state, self.t["markov_head.markov_w1.weight"][before]))
        return torch.sigmoid(weight[0] @ state + bias[0])

    def chain(self, taps: Tensor, text: list[int], count: int) -> list[int]:
        """The greedy draft after a text; taps know all of it but its last token."""
        anchor, before, found = len(text) - 1, text[-1], []
        for state in self.told(taps, anchor, before)[:count]:
            column = int(self.logits(state, before).argmax())
            before = column if self.ids is None else int(self.ids[column])
            found.append(before)
        return found
