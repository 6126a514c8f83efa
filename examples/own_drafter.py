"""A drafter of one's own: it guesses that the text goes on as it did after the same last token.

python examples/own_drafter.py

Whatever it guesses, the text is the target's: only the number of passes changes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hunch import LLM, SamplingParams
from hunch.draft import Draft, Needs
from hunch.registry import DRAFTERS

NUM_NODES = 4


class LastSeen:
    """Looks up where the last token stood before, and guesses what followed it there."""

    def __init__(self, options: Mapping[str, str], path: str | None, context: Any) -> None:
        self.needs = Needs(max_nodes=NUM_NODES)

    def observe(self, step: Any) -> None:
        """Nothing to learn: the rows hold the whole text."""

    def propose(self, rows: Any) -> Draft:
        chains = []
        for row in rows.ids_R.tolist():
            text = rows.tokens_XL[row, : rows.known_X[row]].tolist()
            length = min(NUM_NODES, int(rows.max_draft_X[row]))
            places = [at for at, token in enumerate(text[:-1]) if token == text[-1]]
            chains.append(text[places[-1] + 1 :][:length] if places else [])
        return Draft.chains(chains)

    def forget(self, rows: list[int]) -> None:
        """No state of any row is kept."""


def main() -> None:
    DRAFTERS["last-seen"] = f"{__name__}:LastSeen"
    params = SamplingParams(temperature=0.0, max_tokens=64)
    prompt = "One sheep, two sheep, three sheep, four sheep,"
    with LLM("smollm2-135m", speculate="off") as plain:
        own = plain.sibling("last-seen")  # the same weights
        answers = [llm.generate(prompt, params)[0].outputs[0] for llm in (plain, own)]
    assert answers[0].token_ids == answers[1].token_ids
    print(answers[1].text)
    print(f"plain: {answers[0].stats['steps']} passes; last-seen: {answers[1].stats['steps']}")


if __name__ == "__main__":
    main()
