"""Does sampled text follow the model's own distribution? Chi-square over many samples.

For verifiers whose tokens are not those of plain decoding under the same seed. Every beginning that
many samples share is a context; their next tokens are compared with the target's chances after it,
which are scored without speculation. Given their context, next tokens are independent draws, so the
contexts' statistics add up. The first token of an answer is never drafted; the later ones are.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import erfc, exp, inf, sqrt

from hunch import LLM, SamplingParams
from hunch.bench.equality import Guesses
from hunch.errors import ConfigError

LEAST_EXPECTED = 5.0  # cells below are counted together, as the chi-square distribution needs
ALPHA = 1e-4  # a smaller p-value means a fault
NUM_TOKENS = 4


@dataclass(slots=True)
class Agreement(Guesses):
    """How well samples fit. `p_value` is the chance of a fit this bad if nothing is wrong."""

    num_samples: int = 0
    statistic: float = 0.0
    degrees: int = 0

    @property
    def p_value(self) -> float:
        return upper_tail(self.statistic, self.degrees)

    @property
    def is_good(self) -> bool:
        return self.p_value >= ALPHA


def fit(
    llm: LLM, scorer: LLM, prompts: Sequence[list[int]], params: SamplingParams, num_samples: int
) -> Agreement:
    """Samples of every prompt by `llm` against the chances that `scorer` gives.

    The scorer decodes plainly, with logprobs_mode="processed_logprobs".
    """
    # A context is scored as a prompt, so no parameter may depend on which part was generated.
    if params.presence_penalty or params.frequency_penalty or params.min_tokens:
        raise ConfigError(
            "chi-square needs requests without presence_penalty, frequency_penalty and min_tokens"
        )
    asked = replace(params, n=num_samples, max_tokens=NUM_TOKENS, stop=(), ignore_eos=True)
    agreement = Agreement()
    for prompt in prompts:
        (output,) = llm.generate([prompt], asked, use_tqdm=False)
        agreement.num_samples += num_samples
        agreement.add(output.stats)
        texts = [tuple(answer.token_ids) for answer in output.outputs]
        followers: dict[tuple[int, ...], Counter[int]] = defaultdict(Counter)
        for text in texts:
            for place, token in enumerate(text):
                followers[text[:place]][token] += 1
        _add(agreement, scorer, prompt, followers, asked)
    return agreement


def _add(
    agreement: Agreement,
    scorer: LLM,
    prompt: list[int],
    followers: dict[tuple[int, ...], Counter[int]],
    params: SamplingParams,
) -> None:
    common = [
        (context, counts)
        for context, counts in followers.items()
        if counts.total() >= 4 * LEAST_EXPECTED
    ]
    ask = replace(params, n=1, max_tokens=1, logprobs=-1)  # of all tokens the model has
    outputs = scorer.generate([prompt + list(c) for c, _ in common], ask, use_tqdm=False)
    for (_, counts), output in zip(common, outputs, strict=True):
        scores = (output.outputs[0].logprobs or [{}])[0]
        chances = {token: exp(score.logprob) for token, score in scores.items()}
        statistic, degrees = chi_square(counts, chances)
        agreement.statistic += statistic
        agreement.degrees += degrees


def upper_tail(statistic: float, degrees: int) -> float:
    """The chance that chi-square exceeds the statistic, by Wilson and Hilferty's approximation."""
    if not degrees:
        return 1.0
    if statistic == inf:
        return 0.0
    spread = 2 / (9 * degrees)
    return 0.5 * erfc(((statistic / degrees) ** (1 / 3) - 1 + spread) / sqrt(2 * spread))


def chi_square(counts: Counter[int], chances: dict[int, float]) -> tuple[float, int]:
    """The statistic and its degrees of freedom. Rare tokens share a cell."""
    total = counts.total()
    if any(chances.get(token, 0.0) == 0.0 for token in counts):
        return inf, 1
    common = {t: chance for t, chance in chances.items() if chance * total >= LEAST_EXPECTED}
    cells = [(counts[token], chance * total) for token, chance in common.items()]
    rest = total * (1 - sum(common.values()))
    if rest >= LEAST_EXPECTED:
        cells.append((total - sum(seen for seen, _ in cells), rest))
    elif cells:  # too few for a cell of their own: they join the rarest
        rarest = min(range(len(cells)), key=lambda i: cells[i][1])
        others = total - sum(seen for seen, _ in cells)
        cells[rarest] = (cells[rarest][0] + others, cells[rarest][1] + max(rest, 0.0))
    if len(cells) < 2:
        return 0.0, 0
    return sum((seen - e) ** 2 / e for seen, e in cells), len(cells) - 1
