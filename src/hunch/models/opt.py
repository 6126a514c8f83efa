"""OPT: learned positions, layer norms, a plain MLP, biases everywhere.

Shape letters: T packed tokens, D width, E width of the embedding, L positions, M rows.
"""

from __future__ import annotations

from torch import Tensor

from hunch.errors import UnsupportedModelError
from hunch.models.build import Names
from hunch.models.decoder import Decoder, Progress
from hunch.models.source import Source
from hunch.models.spec import Config, ModelSpec, read_int

OFFSET = 2  # rows of the position table before that of position 0


class Opt(Decoder):
    """The 350M model has a narrower embedding and its norms after the sums."""

    names = Names(
        embed="model.decoder.embed_tokens.weight",
        final_norm="model.decoder.final_layer_norm",
        layer="model.decoder.layers.{}.",
        attn_norm="self_attn_layer_norm",
        out="self_attn.out_proj",
        mlp_norm="final_layer_norm",
        up="fc1",
        down="fc2",
    )

    def __init__(
        self, spec: ModelSpec, source: Source, progress: Progress = lambda names: names
    ) -> None:
        super().__init__(spec, source, progress)
        self.positions_LD = source.take(
            "model.decoder.embed_positions.weight", spec.max_len + OFFSET, spec.width
        )
        self.project_in = self.project_out = None
        if spec.embed_width:
            self.project_in = source.linear(
                ("model.decoder.project_in",), (spec.width,), spec.embed_width, is_split=False
            )
            self.project_out = source.linear(
                ("model.decoder.project_out",), (spec.embed_width,), spec.width, is_split=False
            )

    @classmethod
    def read_config(cls, config: Config, architecture: str) -> ModelSpec:
        if not config.get("layer_norm_elementwise_affine", True):
            raise UnsupportedModelError("layer_norm_elementwise_affine=false is not supported")
        width, num_heads = read_int(config, "hidden_size"), read_int(config, "num_attention_heads")
        num_layers = read_int(config, "num_hidden_layers")
        embed_width = read_int(config, "word_embed_proj_dim", width)
        is_pre_norm = bool(config.get("do_layer_norm_before", True))
        has_bias = bool(config.get("enable_bias", True))
        return ModelSpec(
            architecture=architecture,
            vocab_size=read_int(config, "vocab_size"),
            width=width,
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=num_heads,
            head_dim=width // num_heads,
            ffn_width=read_int(config, "ffn_dim"),
            max_len=read_int(config, "max_position_embeddings", 2048),
            norm="layer",
            norm_eps=1e-5,
            activation=str(config.get("activation_function", "relu")),
            is_gated=False,
            windows=(None,) * num_layers,
            is_tied=bool(config.get("tie_word_embeddings", True)),
            has_qkv_bias=has_bias,
            has_out_bias=has_bias,
            has_mlp_bias=has_bias,
            embed_width=embed_width if embed_width != width else 0,
            is_post_norm=not is_pre_norm,
            has_final_norm=is_pre_norm and not config.get("_remove_final_layer_norm", False),
            dtype=config.get("torch_dtype") or config.get("dtype"),
        )

    def start(self, ids_T: Tensor, pos_T: Tensor) -> Tensor:
        x_TE = self.embed(ids_T)
        x_TD = x_TE if self.project_in is None else self.project_in(x_TE)
        return x_TD + self.positions_LD.index_select(0, pos_T + OFFSET)

    def logits(self, hidden_MD: Tensor) -> Tensor:
        if self.project_out is not None:
            hidden_MD = self.project_out(hidden_MD)
        return super().logits(hidden_MD)
