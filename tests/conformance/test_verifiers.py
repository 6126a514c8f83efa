"""Every lossless verifier follows the target's distribution; every planted fault is found out.

End to end through the engine, with its own noise: thousands of samples of a model over five tokens,
compared with the chance of every text of four tokens (the first is plain, the others drafted).
"""

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.stats import chisquare, kstest

from hunch import LLM, SamplingParams
from hunch.drafting.token_chooser import Children, TokenChooser
from hunch.kernels import noise
from hunch.registry import LOSSY, VERIFIERS
from hunch.sampling.state import SamplingState
from hunch.verify import base, rejection
from tiny_vocab import PROMPT, joint_chances, write_drafter, write_target

LENGTH = 4
KINDS = {  # {near} and {far} are draft models
    "sampled chain": "draft:{near}:adaptive=false:num_nodes=3",
    "hotter sampled chain": "draft:{near}:adaptive=false:num_nodes=3:draft_temperature=2.0",
    "sampled chain, early end": "draft:{near}:adaptive=false:num_nodes=3:min_confidence=0.5",
    "one-hot chain": "ngram:num_nodes=3:adaptive=false",
    "sampled tree": "draft:{near}:adaptive=false:num_nodes=4:tree=fixed:branch=2",
    "chosen tree": "draft:{near}:adaptive=false:num_nodes=6:tree=dynamic:branch=2:depth=3",
}
LOSSLESS = sorted(set(VERIFIERS) - LOSSY)
Joint = dict[tuple[int, ...], float]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("vocab")
    target = write_target(folder / "target")
    near = write_drafter(target, folder / "near", wrong=0.2)
    far = write_drafter(target, folder / "far", wrong=1.0)
    return {"target": target, "near": near, "far": far}


@pytest.fixture(scope="module")
def engine(files: dict[str, Path]) -> Iterator[Callable[[str, str], LLM]]:
    made: dict[tuple[str, str], LLM] = {}

    def make(speculate: str, verifier: str = "exact") -> LLM:
        key = (speculate, verifier)
        if key not in made:
            made[key] = LLM(
                str(files["target"]),
                speculate=speculate.format(**files),
                verifier=verifier,
                max_num_seqs=128,
                max_model_len=64,
                kv_bytes=8_000_000,
                dtype="float32",
                threads=1,
            )
        return made[key]

    yield make
    for llm in made.values():
        llm.close()


@pytest.fixture(scope="module")
def joint(engine: Callable[..., LLM]) -> Callable[[float], Joint]:
    known: dict[float, Joint] = {}

    def at(temperature: float) -> Joint:
        if temperature not in known:
            known[temperature] = joint_chances(engine("off"), temperature, LENGTH)
            assert sum(known[temperature].values()) == pytest.approx(1)
        return known[temperature]

    return at


def p_value(
    llm: LLM, chances: Joint, temperature: float, num: int, seed: int = 1, upto: int = LENGTH
) -> float:
    """How likely so great a deviation from the chances is; rare texts are counted together.

    `upto` compares only the first so many tokens.
    """
    params = SamplingParams(
        temperature=temperature, n=num, max_tokens=LENGTH, seed=seed, ignore_eos=True
    )
    (output,) = llm.generate([PROMPT], params, use_tqdm=False)
    assert output.stats["drafted"] > num / 2, "without drafts nothing is tested"
    assert output.stats["accepted"] > num / 20
    seen = Counter(tuple(answer.token_ids[:upto]) for answer in output.outputs)
    shorter: Joint = {}
    for text, chance in chances.items():
        shorter[text[:upto]] = shorter.get(text[:upto], 0.0) + chance
    common = {text: chance for text, chance in shorter.items() if chance * num >= 5}
    observed = [seen[text] for text in common]
    expected = [chance * num for chance in common.values()]
    return float(
        chisquare([*observed, num - sum(observed)], [*expected, num - sum(expected)]).pvalue
    )


# With `exact`, texts are those of plain decoding, which other tests show for every drafter.
PAIRS = [
    pytest.param(
        verifier,
        kind,
        marks=[pytest.mark.slow] * (verifier == "exact" and kind != "sampled tree"),
    )
    for verifier in LOSSLESS
    for kind in ("sampled chain", "one-hot chain", "sampled tree")
]


@pytest.mark.parametrize(("verifier", "kind"), PAIRS)
def test_texts_have_the_chances_the_target_gives_them(
    verifier: str, kind: str, engine: Callable[..., LLM], joint: Callable[[float], Joint]
) -> None:
    assert p_value(engine(KINDS[kind], verifier), joint(1.0), 1.0, 1200) > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.7])
@pytest.mark.parametrize("kind", sorted(KINDS))
@pytest.mark.parametrize("verifier", LOSSLESS)
def test_texts_have_their_chances_at_every_temperature(
    verifier: str,
    kind: str,
    temperature: float,
    engine: Callable[..., LLM],
    joint: Callable[[float], Joint],
) -> None:
    llm = engine(KINDS[kind], verifier)
    assert p_value(llm, joint(temperature), temperature, 1500, seed=2) > 1e-3


@pytest.mark.slow
def test_p_values_of_sound_code_are_uniform(
    engine: Callable[..., LLM], joint: Callable[[float], Joint]
) -> None:
    pairs = [(v, k) for v in ("rejection", "block") for k in ("sampled chain", "sampled tree")]
    values = [
        p_value(engine(KINDS[kind], verifier), joint(1.0), 1.0, 1500, seed=100 + number)
        for number, (verifier, kind) in enumerate(pairs * 5)
    ]
    assert kstest(values, "uniform").pvalue > 0.01


@pytest.mark.parametrize("verifier", sorted(VERIFIERS))
def test_a_lossy_verifier_is_called_so_everywhere(
    verifier: str, engine: Callable[..., LLM], caplog: pytest.LogCaptureFixture
) -> None:
    llm = engine("ngram:num_nodes=2", verifier)
    (output,) = llm.generate([PROMPT], SamplingParams(max_tokens=4, n=2, ignore_eos=True))
    is_lossy = verifier in LOSSY
    assert llm.stats()["is_lossy"] is is_lossy
    assert ("lossy" in output.stats) is is_lossy
    assert all(("lossy" in answer.stats) is is_lossy for answer in output.outputs)
    assert ("LOSSY" in caplog.text) is is_lossy


@pytest.mark.parametrize("verifier", LOSSLESS)
def test_the_same_seed_gives_the_same_samples(verifier: str, engine: Callable[..., LLM]) -> None:
    llm = engine(KINDS["sampled chain"], verifier)
    params = SamplingParams(n=8, max_tokens=12, seed=5, ignore_eos=True)
    one, again = (llm.generate([PROMPT], params)[0].outputs for _ in range(2))
    assert [a.token_ids for a in one] == [a.token_ids for a in again]
    assert len({tuple(a.token_ids) for a in one}) > 4


# --- planted faults -------------------------------------------------------------------------------


def share_noise(patch: pytest.MonkeyPatch) -> None:
    """The residual is drawn with the draft's noise."""
    patch.setattr(base, "RESIDUAL", noise.DRAFT)


def swap_p_and_q(patch: pytest.MonkeyPatch) -> None:
    def swapped(p_V: Any, q_V: Any, token: int) -> float:
        return min(1.0, float(q_V[token] / p_V[token]))

    patch.setattr(rejection, "chance", swapped)


def take_the_bonus_from_the_draft(patch: pytest.MonkeyPatch) -> None:
    sound = rejection._try_children

    def try_children(draft: Any, target: Any, node: int, *given: Any) -> Any:
        kept, left_V = sound(draft, target, node, *given)
        is_end = node >= 0 and not draft.children[node + 1]
        return kept, draft.q(node) if is_end else left_V

    patch.setattr(rejection, "_try_children", try_children)


def chooser_one_place_too_late(patch: pytest.MonkeyPatch) -> None:
    sound = base.TargetChoices.p

    def p(self: Any, draft: Any, node: int, path: list[int]) -> Any:
        return sound(self, draft, min(node + 1, len(draft.tokens) - 1), path)

    patch.setattr(base.TargetChoices, "p", p)


def keep_a_node_for_its_own_chance(patch: pytest.MonkeyPatch) -> None:
    sound = TokenChooser.children

    def children(self: TokenChooser, *given: Any) -> Children:
        draw = sound(self, *given)
        q_M = draw.q_MV.numpy()[np.arange(len(draw.token_MB)), draw.token_MB[:, 0]]
        draw.gain_M = np.log(q_M.astype(np.float64))
        return draw

    patch.setattr(TokenChooser, "children", children)


def call_the_best_children_samples(patch: pytest.MonkeyPatch) -> None:
    sound = SamplingState.draw_own

    def draw_own(self: SamplingState, logits_MC: Any, row_M: Any, *rest: Any) -> Any:
        tokens_MB, q_MV, is_sampled_M = sound(self, logits_MC, row_M, *rest)
        return logits_MC.topk(tokens_MB.shape[1], -1).indices, q_MV, is_sampled_M

    patch.setattr(SamplingState, "draw_own", draw_own)


FAULTS = {
    swap_p_and_q: "sampled chain",
    take_the_bonus_from_the_draft: "sampled chain",
    chooser_one_place_too_late: "sampled chain",
    keep_a_node_for_its_own_chance: "sampled chain, early end",
    call_the_best_children_samples: "sampled tree",
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_planted_fault_is_found_out(
    fault: Callable[[pytest.MonkeyPatch], None],
    engine: Callable[..., LLM],
    joint: Callable[[float], Joint],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    llm = engine(KINDS[FAULTS[fault]], "rejection")
    fault(monkeypatch)
    assert p_value(llm, joint(1.0), 1.0, 1200) < 1e-6


@pytest.mark.slow  # the faults above are planted daily, and sound code is seen to be sound
@pytest.mark.parametrize("is_planted", [False, True], ids=["sound", "planted"])
def test_noise_shared_between_draft_and_residual_is_found_out(
    is_planted: bool,
    engine: Callable[..., LLM],
    joint: Callable[[float], Joint],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The faintest of the faults: it shows where drafts are mostly rejected, in many samples."""
    llm = engine("draft:{far}:num_nodes=1", "rejection")
    if is_planted:
        share_noise(monkeypatch)
    found = p_value(llm, joint(1.0), 1.0, 4000, upto=2)
    assert found < 1e-6 if is_planted else found > 1e-3
