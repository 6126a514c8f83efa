"""A target that runs captured steps on a CPU by their specification: no Triton, no GPU."""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from hunch.kernels import best_first, draft, step, successors
from hunch.kernels.attention import AttnInputs, Span, attention_ref
from hunch.kernels.gpu_recurrence import sequences
from hunch.kernels.gpu_tiling import Tiler, Tiling, Workspace
from hunch.kernels.kv_store import KVCache, kv_store_ref
from hunch.kernels.process import count_committed_ref, draft_paths_ref, process_ref
from hunch.kernels.rope import rope, rotation
from hunch.kernels.shared_texts import recall_ref
from hunch.layers.attention import Heads, split_heads
from hunch.models.backends import TRITON
from hunch.models.decoder import Decoder
from hunch.models.target import Hidden
from hunch.sampling.logprobs import best, logprobs_of
from hunch.sampling.state import SamplingState
from hunch.step.host_step import HostStep
from hunch.types import StepPlan


class Chooser:
    """`gpu_sampling.choose` by the rules of the host."""

    def __init__(self) -> None:
        self.state: SamplingState | None = None

    def __call__(
        self, logits_MV: Tensor, row_M: Tensor, pos_M: Tensor, *columns: Any, **how: Any
    ) -> Tensor:
        if not how["is_sampled"]:
            best_M = torch.from_numpy(logits_MV.numpy().argmax(1))
            return best_M if how.get("ids_V") is None else how["ids_V"][best_M]
        assert self.state is not None
        return self.state.draw(logits_MV, row_M, pos_M, how.get("ids_V"))

    def filtered(self, logits_MV: Tensor, row_M: Tensor, *columns: Any) -> Tensor:
        """`gpu_scores.filtered` by the rules of the host."""
        assert self.state is not None
        return self.state.filtered(logits_MV, row_M)


class PlainTiled:
    """`layers.tiled.Tiled` by torch, as its specification has it."""

    def __init__(
        self,
        attn: AttnInputs,
        kv: KVCache,
        table_LH: Tensor,
        tiling: Tiling,
        reads: AttnInputs | None = None,
    ) -> None:
        self.attn, self.kv, self.table_LH, self.reads = attn, kv, table_LH, reads or attn

    def __call__(
        self, qkv_TAH: Tensor, heads: Heads, layer: int, sinks_N: Tensor | None = None
    ) -> Tensor:
        assert sinks_N is None
        attn, k_CMH, v_CMH = self.attn, self.kv.k_LCMH[layer], self.kv.v_LCMH[layer]
        q_TNH, k_TMH, v_TMH = split_heads(qkv_TAH, heads, rotation(self.table_LH, attn.pos_T))
        kv_store_ref(k_TMH, v_TMH, k_CMH, v_CMH, attn.slot_T)
        return attention_ref(q_TNH, k_CMH, v_CMH, self.reads, heads.scale, heads.window)

    def keep(self, k_TMH: Tensor, v_TMH: Tensor, layer: int) -> None:
        turned = rotation(self.table_LH, self.attn.pos_T)
        k_TMH = rope(k_TMH, turned.cos_T1H, turned.sin_T1H)
        k_CMH, v_CMH = self.kv.k_LCMH[layer], self.kv.v_LCMH[layer]
        kv_store_ref(k_TMH, v_TMH, k_CMH, v_CMH, self.attn.slot_T)


class PlainTarget:
    """A decoder of torch's kernels with what a runner of graphs asks of its target."""

    backend, is_quantised, activation_bits = TRITON, False, None

    def __init__(self, decoder: Decoder) -> None:
        self.decoder, self.spec = decoder, decoder.spec
        self.device, self.dtype, self.kv_dtype = decoder.device, decoder.dtype, decoder.kv_dtype
        self.kv_shapes, self.new_kv = decoder.kv_shapes, decoder.new_kv
        self.states_of = decoder.states_of
        self.embed, self.weight_bytes = decoder.embed, decoder.weight_bytes
        self.tables, self.output_rows = decoder.tables, decoder.output_rows
        self.embedding_VD, self.logits = decoder.embedding_VD, decoder.logits
        nothing = torch.empty(0)
        spec = decoder.spec
        self.workspace = Workspace(nothing, nothing, nothing, 64, 1)
        self.tiler = Tiler(
            spec.num_heads, spec.num_kv_heads, spec.max_len, self.workspace, self.device
        )
        self.timing = nullcontext()
        self.logit_exchange = decoder.logit_exchange
        # Of a step that is captured, which has no rows: padding is not computed here.
        self.exchanges = lambda _: decoder.exchanges(0)

    def tiling(self, spans: tuple[Span, ...], num_tokens: int) -> Tiling:
        return Tiling(None)

    def forward(
        self, ids_T: Tensor, attn: AttnInputs, kv: KVCache, layers: tuple[int, ...] = ()
    ) -> Hidden:
        """The tokens that are no padding: a decoder's row is the same bits in any company."""
        if kv.states is not None:
            return self._forward_rows(ids_T, attn, kv, layers)
        live_U = (attn.slot_T >= 0).nonzero()[:, 0]
        here = AttnInputs(
            pos_T=attn.pos_T[live_U],
            slot_T=attn.slot_T[live_U],
            seq_T=attn.seq_T[live_U],
            table_SB=attn.table_SB,
            base_T=attn.base_T[live_U],
            tree_TP=None if attn.tree_TP is None else attn.tree_TP[live_U],
            block_size=attn.block_size,
        )
        outputs = [torch.zeros(len(ids_T), self.spec.width) for _ in (None, *layers)]
        if len(live_U):
            found = self.decoder.forward(ids_T[live_U], here, kv, layers)
            for out_TD, found_UD in zip(outputs, (found.last_TD, *found.features), strict=True):
                out_TD[live_U] = found_UD
        return Hidden(outputs[0], tuple(outputs[1:]))

    def _forward_rows(
        self, ids_T: Tensor, attn: AttnInputs, kv: KVCache, layers: tuple[int, ...]
    ) -> Hidden:
        """Sequence by sequence: rows have states, which nodes must not be folded into."""
        assert attn.tree_TP is None
        hidden_TD = torch.zeros(len(ids_T), self.spec.width)
        features = tuple(torch.zeros(len(ids_T), self.spec.width) for _ in layers)
        for first, last, num_known, row in sequences(attn).tolist():
            num = int((attn.slot_T[first:last] >= 0).sum())
            here, seq = slice(first, first + num), int(attn.seq_T[first])
            if not num:
                continue
            one = AttnInputs(
                attn.pos_T[here], attn.slot_T[here], attn.seq_T[here], attn.table_SB,
                attn.base_T[here], None, attn.block_size,
                (Span(0, num, seq, int(attn.pos_T[first]), num_known),),
                torch.full((seq + 1,), seq if row < 0 else row),
            )  # fmt: skip
            out = self.decoder.forward(ids_T[here], one, kv, layers)
            hidden_TD[here] = out.last_TD
            for feature_TD, found_TD in zip(features, out.features, strict=True):
                feature_TD[here] = found_TD
        return Hidden(hidden_TD, features)


def stand_in(patch: pytest.MonkeyPatch) -> None:
    """From here on, a CPU's LLM runs captured steps with these kernels."""
    import hunch.kernels.gpu_best_first
    import hunch.kernels.gpu_draft
    import hunch.kernels.gpu_graft
    import hunch.kernels.gpu_grow
    import hunch.kernels.gpu_lookup
    import hunch.kernels.gpu_recall
    import hunch.kernels.gpu_successors
    import hunch.kernels.gpu_synthetic
    import hunch.layers.tiled
    import hunch.loading
    import hunch.models.cuda
    import hunch.step.captured_step
    import hunch.step.results
    import hunch.step.runner
    import hunch.step.step_graphs
    import hunch.step.upload
    from hunch.models.load import load_decoder
    from hunch.models.weights import open_weights

    chooser = Chooser()
    made = hunch.step.runner.Runner.__init__

    def remember(runner: Any, parts: Any, **how: Any) -> None:
        chooser.state = parts.sampling
        made(runner, parts, **how)

    def load(config: Any, files: Any, device: torch.device) -> PlainTarget:
        return PlainTarget(load_decoder(open_weights(files), dtype="float32", device=device))

    patch.setattr(hunch.step.runner.Runner, "__init__", remember)
    # Steps of more rows are captured when they come: a test takes few of all that could come.
    patch.setattr(hunch.step.captured_step, "MAX_PREPARED", 2)
    # To time a draft is to run it once more, and a CPU has no clock for it.
    patch.setattr(hunch.step.step_graphs.StepGraphs, "_seconds_of_drafting", lambda *_: 0.0)
    patch.setattr(hunch.loading, "load_target_of", load)
    patch.setattr(hunch.models.cuda, "CudaDecoder", PlainTarget)
    for name in ("pack", "commit", "compact", "deliver"):
        patch.setattr(hunch.step.step_graphs, name, getattr(step, f"{name}_ref"))
    patch.setattr(hunch.step.step_graphs, "choose", chooser)
    patch.setattr(hunch.step.step_graphs, "expect", draft.expect_ref)
    patch.setattr(hunch.step.step_graphs, "filtered", chooser.filtered)
    patch.setattr(hunch.step.step_graphs, "process", process)
    patch.setattr(hunch.step.step_graphs, "count_committed", count_committed_ref)
    patch.setattr(hunch.step.results, "scores", scores)
    patch.setattr(hunch.step.results, "committed", step.committed_ref)
    patch.setattr(hunch.step.step_graphs, "draft_paths", draft_paths_ref)
    patch.setattr(hunch.step.upload, "update", step.update_ref)
    patch.setattr(hunch.kernels.gpu_lookup, "lookup", draft.lookup_ref)
    patch.setattr(hunch.kernels.gpu_recall, "recall", recall_ref)
    patch.setattr(hunch.kernels.gpu_successors, "successor_tree", successors.successor_tree_ref)
    patch.setattr(hunch.kernels.gpu_synthetic, "remembered", draft.remembered_ref)
    patch.setattr(hunch.kernels.gpu_graft, "graft", draft.graft_ref)
    patch.setattr(hunch.kernels.gpu_graft, "keep_likeliest", best_first.keep_likeliest_ref)
    patch.setattr(hunch.kernels.gpu_draft, "known_inputs", draft.level_inputs_ref)
    patch.setattr(hunch.kernels.gpu_draft, "committed_inputs", draft.committed_inputs_ref)
    patch.setattr(hunch.kernels.gpu_grow, "grow_level", draft.grow_level_ref)
    patch.setattr(hunch.kernels.gpu_best_first, "extend", best_first.extend_ref)
    patch.setattr(hunch.kernels.gpu_best_first, "ranked", best_first.ranked_ref)
    patch.setattr(hunch.layers.tiled, "Tiled", PlainTiled)


def scores(
    logits_MV: Tensor, at_S: Tensor, token_S: Tensor, num_best: int, out_RKE: Tensor
) -> None:
    num_k = out_RKE.shape[1]
    for s, (at, token) in enumerate(zip(at_S.tolist(), token_S.tolist(), strict=True)):
        if at >= 0:
            x_1V = logits_MV[at : at + 1]
            count = min(num_best, x_1V.shape[1])
            near = best(x_1V.float(), count)[0] if count else []
            ids = [token, *map(int, near)]
            told = [logprobs_of(x_1V, [one], 0)[0][one] for one in ids]
            none = num_best - count  # no more than the vocabulary has
            ids += [-1] * none
            values = [score.logprob for score in told] + [-math.inf] * none
            bits = torch.tensor(values).view(torch.int32).tolist()
            pairs = [number for pair in zip(ids, bits, strict=True) for number in pair]
            out_RKE[s // num_k, s % num_k] = torch.tensor([told[0].rank, *pairs])


def process(
    logits_MV: Tensor, row_M: Tensor, pos_M: Tensor, path_MP: Tensor, tables: Any, *masks: Any
) -> Tensor:
    return process_ref(logits_MV, row_M, pos_M, path_MP, tables, *masks)


def lead_by_host(runner: Any) -> None:
    """From here on, the host runs every step of this runner."""
    runner.captured = runner.host.captured = None


def lead_noted(monkeypatch: pytest.MonkeyPatch) -> list[StepPlan]:
    """Plans of which the host packs a part, from here on: prompts, and what it runs itself."""
    from hunch.step.prompts import PromptSteps

    by_host: list[StepPlan] = []
    for owner, name in ((HostStep, "run"), (PromptSteps, "launch")):
        lead = getattr(owner, name)

        def note(own: Any, plan: StepPlan, *rest: Any, lead: Any = lead) -> Any:
            by_host.append(plan)
            return lead(own, plan, *rest)

        monkeypatch.setattr(owner, name, note)
    return by_host
