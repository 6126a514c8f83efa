"""Every family against transformers, in float32, on small random models."""

import pytest
import torch

from builders import DictWeights, Seq, new_kv, pack, plain_logits, tables, tiny_spec
from hunch.config import ModelConfig
from hunch.errors import ModelFormatError
from hunch.models.load import load_decoder
from hunch.models.load_target import load_target
from hunch.models.weights.configs import unified_config
from their_models import CASES, IDS, check_logits, make

# transformers compiles some of GPTBigCode when it is imported.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script.:DeprecationWarning")


@pytest.fixture(
    scope="module",
    params=[  # transformers takes 6 s to import it
        pytest.param(name, marks=pytest.mark.slow) if name == "gemma 4, unified" else name
        for name in CASES
    ],
)
def pair(request):
    """transformers' model, and ours with its tensors and its config as it would be saved."""
    theirs, saved, tensors = make(request.param)
    return theirs, load_decoder(DictWeights(saved, tensors))


@torch.no_grad()
def test_logits_are_those_of_transformers(pair):
    theirs, ours = pair
    expected = theirs(torch.tensor([IDS])).logits[0]
    assert expected.std() > 0.1
    check_logits(ours, theirs)


@torch.no_grad()
def test_greedy_text_is_that_of_transformers(pair):
    theirs, ours = pair
    theirs.generation_config.eos_token_id = None
    expected = theirs.generate(torch.tensor([IDS]), max_new_tokens=4, do_sample=False)
    ids, kv = IDS, new_kv(ours)
    ids_T, attn = pack([Seq(ids)])
    for _ in range(4):
        logits = ours.logits(ours.forward(ids_T, attn, kv).last_TD[-1:])
        ids = [*ids, int(logits.argmax())]
        ids_T, attn = pack([Seq(ids[-1:], start=len(ids) - 1)])
    assert ids == expected[0].tolist()


@torch.no_grad()
def test_features_are_the_hidden_states_of_transformers(pair):
    theirs, ours = pair
    expected = theirs(torch.tensor([IDS]), output_hidden_states=True).hidden_states
    ids_T, attn = pack([Seq(IDS)])
    hidden = ours.forward(ids_T, attn, new_kv(ours), feature_layers=(2, 0, 1))
    for layer, feature in zip((2, 0, 1), hidden.features, strict=True):
        torch.testing.assert_close(
            feature, expected[layer][0].reshape(feature.shape), atol=1e-4, rtol=1e-4
        )


def test_chunks_and_single_tokens_give_the_same_logits(pair):
    _, ours = pair
    expected = plain_logits(ours, IDS)
    for sizes in ([17, 5, 19], [36, *[1] * 5]):
        kv, done, parts = new_kv(ours), 0, []
        for size in sizes:
            ids_T, attn = pack([Seq(IDS[done : done + size], start=done)])
            parts.append(ours.logits(ours.forward(ids_T, attn, kv).last_TD))
            done += size
        torch.testing.assert_close(torch.cat(parts), expected, atol=1e-4, rtol=1e-4)


def test_a_node_of_a_tree_sees_its_own_path(pair):
    """Also beside another sequence, and after padding was added to the step."""
    _, ours = pair
    draft, parents = [7, 8, 9, 7, 11, 12], [-1, -1, 0, 1, 2, 2]
    table_SB, kv = tables(2), new_kv(ours, 2)
    before, other = IDS[:13], IDS[20:29]
    ids_T, attn = pack([Seq(before[:-1]), Seq(other[:-2])], table_SB)
    ours.forward(ids_T, attn, kv)
    step = [
        Seq(before[-1:], start=len(before) - 1, draft=draft, parents=parents),
        Seq(other[-2:], start=len(other) - 2),
    ]
    ids_T, attn = pack(step, table_SB, num_padding=2)
    logits = ours.logits(ours.forward(ids_T, attn, kv).last_TD)
    for node in range(len(draft)):
        path, at = [], node
        while at >= 0:
            path.insert(0, draft[at])
            at = parents[at]
        expected = plain_logits(ours, [*before, *path])[-1]
        torch.testing.assert_close(logits[1 + node], expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(
        logits[len(draft) + 2], plain_logits(ours, other)[-1], atol=1e-4, rtol=1e-4
    )


@torch.no_grad()
def test_what_reads_text_in_models_of_text_and_pictures():
    theirs, saved, tensors = make("qwen2")
    outer = {"architectures": ["Qwen2_5_VLForConditionalGeneration"], "vision_config": {"depth": 2}}
    saved |= {"rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]}}
    del saved["rope_parameters"]["rope_type"], saved["architectures"]
    saved["rope_theta"] = saved.pop("rope_parameters")["rope_theta"]
    renamed = {
        name.replace("model.", "model.language_model.", 1): value for name, value in tensors.items()
    }
    renamed["model.visual.blocks.0.norm1.weight"] = torch.zeros(3)
    config = unified_config({**outer, "image_token_id": 5, "text_config": saved})
    ours = load_decoder(DictWeights(config, renamed))
    check_logits(ours, theirs)


def test_fused_tensors_have_the_rows_that_the_config_counts():
    """Or heads would be read as others: transformers has no such setting for this family."""
    _, saved, tensors = make("gpt-neox")
    given = {"num_key_value_heads": 2}
    with pytest.raises(ModelFormatError, match=r"query_key_value.*accounts for 64 rows"):
        load_decoder(DictWeights(unified_config(saved | given), tensors))


@torch.no_grad()
def test_exaone_3_is_llama_under_other_names():
    theirs, saved, tensors = make("llama 3")
    saved |= {"architectures": ["ExaoneForCausalLM"], "num_layers": saved.pop("num_hidden_layers")}
    saved |= {"layer_norm_epsilon": saved.pop("rms_norm_eps")}
    saved |= {"activation_function": saved.pop("hidden_act")}
    names = {"model.": "transformer.", "embed_tokens": "wte", "layers": "h", "gate_proj": "c_fc_0"}
    names |= {"input_layernorm": "ln_1", "post_attention_layernorm": "ln_2", "up_proj": "c_fc_1"}
    names |= {"self_attn": "attn.attention", "o_proj": "out_proj", "down_proj": "c_proj"}
    names |= {"transformer.norm": "transformer.ln_f"}
    renamed = {}
    for name, value in tensors.items():
        for theirs_, ours_ in names.items():
            name = name.replace(theirs_, ours_)
        renamed[name] = value
    ours = load_decoder(DictWeights(unified_config(saved), renamed))
    check_logits(ours, theirs)


@torch.no_grad()
def test_internlm_2_is_llama_under_other_names():
    theirs, saved, tensors = make("llama, grouped heads, tied")
    saved |= {
        "architectures": ["InternLM2ForCausalLM"],
        "bias": False,
        "tie_word_embeddings": False,
    }
    names = {
        "embed_tokens": "tok_embeddings",
        "lm_head": "output",
        "input_layernorm": "attention_norm",
    }
    names |= {"post_attention_layernorm": "ffn_norm", "self_attn.o_proj": "attention.wo"}
    names |= {"mlp.gate_proj": "feed_forward.w1", "mlp.up_proj": "feed_forward.w3"}
    names |= {"mlp.down_proj": "feed_forward.w2"}
    renamed = {}
    for name, value in tensors.items():
        for theirs_, ours_ in names.items():
            name = name.replace(theirs_, ours_)
        if "q_proj" in name:  # two queries, the key and the value of each KV head
            before = name.removesuffix("self_attn.q_proj.weight")
            k, v = (tensors[f"{before}self_attn.{part}_proj.weight"] for part in "kv")
            fused = [part.view(2, -1, value.shape[1]) for part in (value, k, v)]
            renamed[f"{before}attention.wqkv.weight"] = torch.cat(fused, dim=1).flatten(0, 1)
        elif "k_proj" not in name and "v_proj" not in name:
            renamed[name] = value
    ours = load_decoder(DictWeights(unified_config(saved), renamed))
    check_logits(ours, theirs)


@torch.no_grad()
def test_gemma_3_inside_a_model_of_text_and_images():
    theirs, saved, tensors = make("gemma 3")
    saved.pop("architectures")
    outer = {"architectures": ["Gemma3ForConditionalGeneration"], "vision_config": {"x": 1}}
    config = unified_config({**outer, "image_token_index": 5, "text_config": saved})
    renamed = {
        name.replace("model.", "language_model.model.", 1): value for name, value in tensors.items()
    }
    renamed["vision_tower.embeddings.weight"] = torch.zeros(3)
    ours = load_decoder(DictWeights(config, renamed))
    check_logits(ours, theirs)


@torch.no_grad()
def test_rope_factors_are_those_of_the_context_that_is_served(caplog):
    """transformers has the others for a text that outgrows the original context."""
    theirs, saved, tensors = make("phi-3, long")
    expected = theirs(torch.tensor([IDS[:30]])).logits[0]

    def logits(max_model_len: int | None) -> torch.Tensor:
        weights = DictWeights(unified_config(saved), tensors)
        how = ModelConfig(max_model_len=max_model_len, kernels="torch")
        return plain_logits(load_target(how, weights, torch.device("cpu")), IDS[:30])

    torch.testing.assert_close(logits(32), expected, atol=1e-4, rtol=1e-4)
    assert "rope factors" not in caplog.text
    assert (logits(None) - expected).abs().max() > 1e-2
    assert "max_model_len=32 uses the former" in caplog.text
    assert logits(33).equal(logits(None))


def test_the_first_files_of_phi_3_call_their_factors_yarn():
    spec = tiny_spec(
        "Phi3ForCausalLM",
        head_dim=8,
        original_max_position_embeddings=64,
        rope_scaling={"type": "yarn", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4},
    )
    assert spec.rope is not None
    assert spec.rope.rope_type == "longrope"
    assert spec.rope.factors == (2.0,) * 4


def test_files_of_phi_3_say_their_original_context_beside_the_factors():
    """transformers takes it from there alone, and 4096 where it is left out."""
    long = {"type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    given = {"rope_scaling": long | {"original_max_position_embeddings": 64}, "head_dim": 8}
    with pytest.raises(ModelFormatError, match="lacks original_max_position_embeddings"):
        tiny_spec("Phi3ForCausalLM", **given)
