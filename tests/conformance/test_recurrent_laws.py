"""The laws where layers are recurrent: a rejected node leaves no trace in a row's state."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import head_files
from builders import tiny_config, tiny_weights
from drafters import untrained
from hunch import LLM, SamplingParams
from hunch.errors import UnsupportedModelError
from hunch.models.heads.mtp import load_mtp
from hunch.models.load import load_decoder
from hunch.models.weights import open_weights
from hunch.registry import DRAFTERS, SYNTHETIC
from tiny_families import write_family
from tiny_models import write_tokenizer

IS_GPU = torch.cuda.is_available()
PROMPTS = [
    "the model and the guess",
    "fast token fast token fast token fast",
    "in the model of the guess in the model of the " * 2,
    "a",
]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=24, ignore_eos=True),
    SamplingParams(temperature=0.9, top_p=0.95, max_tokens=12, seed=7, repetition_penalty=1.1),
]
SIZES: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 2, "num_key_value_heads": 1,
    "head_dim": 32, "num_hidden_layers": 2, "max_position_embeddings": 256,
    "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 1,
    "linear_num_value_heads": 2, "linear_key_head_dim": 32, "linear_value_head_dim": 32,
}  # fmt: skip
SMALL: dict[str, Any] = {"max_model_len": 200, "kv_bytes": 4_000_000, "threads": 1}
ENGINES: dict[str, dict[str, Any]] = {
    # Prompts in chunks; rows that are preempted; a tree that is cut to a chain.
    "suffix:shared=true:adaptive=false": {"max_num_batched_tokens": 7, "max_num_seqs": 4},
    "recycling": {"num_blocks": 8, "block_size": 8, "max_num_seqs": 4},
    "draft": {"max_num_seqs": 3},
}
if IS_GPU:
    ENGINES["suffix:adaptive=false"] = {}  # in captured steps


PLAIN = {name: value for name, value in SIZES.items() if not name.startswith("linear_")}
BARE: dict[str, Any] = {"hidden_size": 64, "num_hidden_layers": 2}
BARE |= dict.fromkeys(("intermediate_size", "num_key_value_heads", "rms_norm_eps", "rope_theta"))
BARE |= dict.fromkeys(("num_attention_heads", "max_position_embeddings"))
MAMBA = {"mamba_n_heads": 8, "mamba_n_groups": 2, "mamba_d_state": 16}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "delta": ("Qwen3_5ForCausalLM", SIZES),
    "convolution": (
        "Lfm2ForCausalLM",
        PLAIN | {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False},
    ),
    "mamba": (
        "GraniteMoeHybridForCausalLM",
        PLAIN
        | MAMBA
        | {"shared_intermediate_size": 96, "num_local_experts": 0, "logits_scaling": 0.5},
    ),
    "attention too": (
        "FalconH1ForCausalLM",
        PLAIN | MAMBA | {"layer_types": None, "mamba_d_ssm": 128, "ssm_out_multiplier": 0.7},
    ),
    "halves": (
        "NemotronHForCausalLM",
        PLAIN
        | {"layer_types": None, "num_hidden_layers": 4, "hybrid_override_pattern": "M-*-"}
        | {"mamba_num_heads": 8, "mamba_head_dim": 16, "n_groups": 2, "ssm_state_size": 16},
    ),
    "no attention": (
        "Mamba2ForCausalLM",
        BARE | {"num_heads": 8, "head_dim": 16, "n_groups": 2, "state_size": 16},
    ),
    "mamba 1": ("FalconMambaForCausalLM", BARE | {"state_size": 16}),
    "lightning": ("MiniMaxForCausalLM", PLAIN | {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "channel by channel": (
        "KimiLinearForCausalLM",
        {key: value for key, value in PLAIN.items() if key != "head_dim"}
        | {"kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 32, "v_head_dim": 16}
        | {"linear_head_dim": 16, "linear_num_heads": 3, "moe_intermediate_size": 32}
        | {"num_experts": 6, "num_experts_per_tok": 2, "rope_theta": None},
    ),
}
BY_TORCH = ("mamba 1", "lightning", "channel by channel")  # the kernels do not know them
OTHERS = sorted(set(KINDS) - {"delta"})


def write(kind: str, path: Path) -> Path:
    """Weights large enough for text that wanders and repeats."""
    architecture, sizes = KINDS[kind]
    config = tiny_config(architecture, **sizes, vocab_size=write_tokenizer(path))
    config |= {"eos_token_id": config["vocab_size"] - 1, "torch_dtype": "float32"}
    tensors = tiny_weights(config, scale=2.0).tensors
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    (path / "config.json").write_text(json.dumps(config))
    return path


@pytest.fixture(
    scope="module",
    params=["delta", *(pytest.param(kind, marks=pytest.mark.slow) for kind in OTHERS)],
)
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(request.param, tmp_path_factory.mktemp(request.param.replace(" ", "")))


def texts(llm: LLM, some: list[SamplingParams] = PARAMS) -> list[list[int]]:
    outputs = [llm.generate(PROMPTS, params, use_tqdm=False) for params in some]
    return [output.outputs[0].token_ids for batch in outputs for output in batch]


@pytest.mark.parametrize("kernels", ["auto", pytest.param("torch", marks=pytest.mark.slow)])
def test_text_depends_on_the_target_and_the_seed_alone(
    kernels: str, target: Path, tmp_path: Path
) -> None:
    check_text(target, kernels, tmp_path)


@pytest.mark.parametrize("kind", ["convolution", "mamba", "halves"])
def test_so_it_does_with_other_kinds_of_layers(kind: str, tmp_path: Path) -> None:
    (tmp_path / "target").mkdir()
    check_text(write(kind, tmp_path / "target"), "auto", tmp_path)


def check_text(target: Path, kernels: str, tmp_path: Path) -> None:
    draft = write_family(tmp_path / "draft", "qwen3", seed=1)
    options: dict[str, Any] = {**SMALL, "kernels": kernels}
    with LLM(str(target), speculate="off", max_num_seqs=1, **options) as llm:
        names = {"torch": "torch", "auto": "triton" if IS_GPU else "native"}
        is_known = not any(name.replace(" ", "") in target.name for name in BY_TORCH)
        assert llm.engine.capacity.kernels == names[kernels if is_known else "torch"]
        expected = texts(llm)
    assert len({tuple(ids) for ids in expected}) > len(PROMPTS)
    for method, arguments in ENGINES.items():
        speculate = f"draft:{draft}:tree=dynamic" if method == "draft" else method
        given = {**options, **arguments, "always_draft": True}
        with LLM(str(target), speculate=speculate, **given) as llm:
            for _ in range(1 + ("shared" in method)):  # the second time, it knows the answers
                assert texts(llm) == expected, method
            stats = llm.stats()
            assert stats["drafted"] > 0
            assert stats["num_preemptions"] > 0 or "num_blocks" not in arguments or IS_GPU
            assert stats["accepted"] > 0 or "shared" not in method


@pytest.mark.slow
def test_every_drafter_leaves_the_text_as_it_is(target: Path, tmp_path: Path) -> None:
    params = replace(PARAMS[1], prediction="the model of the guess in the model of the")
    with LLM(str(target), speculate="off", max_num_seqs=1, **SMALL) as llm:
        expected = texts(llm, [params])
    draft = write_family(tmp_path / "draft", "qwen3", seed=1)
    study = head_files.study(target, prompts=PROMPTS[:2])
    for method in sorted(set(DRAFTERS) - {"off"} - SYNTHETIC):
        speculate = untrained(method, study, draft, tmp_path)
        with LLM(str(target), speculate=speculate, always_draft=True, **SMALL) as llm:
            assert texts(llm, [params]) == expected, method
            assert llm.stats()["drafted"] > 0, method


@pytest.mark.parametrize(
    "method", ["suffix:adaptive=false", pytest.param("draft", marks=pytest.mark.slow)]
)
def test_captured_steps_too(method: str, target: Path, tmp_path: Path) -> None:
    """As on a GPU, by its kernels' specification: drafts are made and checked within steps."""
    pytest.importorskip("triton")
    from stand_in import lead_by_host, stand_in

    options: dict[str, Any] = {**SMALL, "device": "cpu", "kernels": "torch"}
    some = PARAMS[target.name.startswith("delta") :]  # other targets repeat themselves less
    if method == "draft":
        method = f"draft:{write_family(tmp_path, 'qwen3', seed=1)}:tree=dynamic"
    with pytest.MonkeyPatch.context() as patch:
        stand_in(patch)
        with LLM(str(target), speculate="off", max_num_seqs=1, **options) as llm:
            lead_by_host(llm.engine.runner)
            expected = texts(llm, some)
        given = {**options, "max_num_batched_tokens": 17, "always_draft": True}
        with LLM(str(target), speculate=method, **given) as llm:
            assert texts(llm, some) == expected
            assert llm.stats()["drafted"] > 0


HEAD = "the guess of the model and a fast token in the text of the " * 4
SHARED = [HEAD + tail for tail in ("model", "guess and the model " * 5, "fast", "fast")]


@pytest.mark.parametrize(
    "kernels", ["auto", pytest.param("torch", marks=pytest.mark.slow), "captured"]
)
def test_what_texts_share_is_read_once_and_changes_none(kernels: str, target: Path) -> None:
    """Rows begin with the states that others left at the ends of blocks."""
    options = {**SMALL, "kernels": "auto" if kernels == "auto" else "torch", "block_size": 8}
    params = replace(PARAMS[1], n=2)
    with pytest.MonkeyPatch.context() as patch:
        if kernels == "captured":
            pytest.importorskip("triton")
            from stand_in import stand_in

            stand_in(patch)
            options["device"] = "cpu"
        found = []
        for more in (
            {"enable_prefix_caching": False, "speculate": "off"},
            {"speculate": "off"},
            {"speculate": "suffix:adaptive=false", "always_draft": True, "num_blocks": 40},
        ):
            with LLM(str(target), **options, **more) as llm:
                outputs = [llm.generate(one, params, use_tqdm=False)[0] for one in SHARED]
                outputs += llm.generate(SHARED, params, use_tqdm=False)
                found.append([[o.token_ids for o in output.outputs] for output in outputs])
                hits = [output.num_cached_tokens for output in outputs[:4]]
                assert all(hits[2:]) if more.get("enable_prefix_caching", True) else not any(hits)
        assert found[1] == found[0]
        assert found[2] == found[0]


def test_its_own_mtp_layer_drafts(tmp_path: Path) -> None:
    """As Qwen publishes it, beside the target's tensors: one more layer, which attends."""
    (tmp_path / "target").mkdir()
    target = write("delta", tmp_path / "target")
    tensors = load_file(target / "model.safetensors")
    layer = {
        name.replace("model.layers.1.", "mtp.layers.0."): tensor.clone()
        for name, tensor in tensors.items()
        if name.startswith("model.layers.1.")
    }
    stem, width = "mtp.layers.0.self_attn", SIZES["hidden_size"]
    q, gate = (layer.pop(f"{stem}.{name}.weight") for name in ("q_proj", "attn_gate"))
    both = [x.view(-1, 1, SIZES["head_dim"], width) for x in (q, gate)]
    layer[f"{stem}.q_proj.weight"] = torch.cat(both, dim=1).flatten(0, 2)
    layer["mtp.fc.weight"] = torch.eye(width).repeat(1, 2)
    names = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
    layer |= {f"mtp.{name}.weight": torch.zeros(width) for name in names}
    config = json.loads((target / "config.json").read_text())
    config |= {"model_type": "qwen3_5_text", "mtp_num_hidden_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file({**tensors, **layer}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    shutil.copy(target / "tokenizer.json", tmp_path)
    decoder = load_decoder(open_weights(tmp_path))
    block, own = load_mtp(tmp_path, decoder).stages[0].block, decoder.layers[1]
    pairs = zip(block.named_tensors(), own.named_tensors(), strict=True)
    for (name, found), (_, wanted) in pairs:  # it was made from the target's last layer
        assert torch.equal(found, wanted), name
    with LLM(str(tmp_path), speculate="off", max_num_seqs=1, **SMALL) as llm:
        expected = texts(llm, PARAMS[1:])
        alike = [llm.generate(one, PARAMS[0])[0].outputs[0].token_ids for one in SHARED]
    with LLM(str(tmp_path), speculate=f"mtp:{tmp_path}", always_draft=True, **SMALL) as llm:
        assert texts(llm, PARAMS[1:]) == expected
        assert llm.stats()["drafted"] > 0
        outputs = [llm.generate(one, PARAMS[0])[0] for one in SHARED]
        assert [output.outputs[0].token_ids for output in outputs] == alike
        assert all(output.num_cached_tokens for output in outputs[2:])


def test_what_cannot_be_done_yet_is_refused(target: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="recurrent layers cannot draft"):
        LLM(str(target), speculate=f"draft:{target}", **SMALL)
