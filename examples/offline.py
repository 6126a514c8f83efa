"""Offline: a few prompts, with the figures of speculation beside each answer.

python examples/offline.py
"""

from hunch import LLM, SamplingParams

PROMPTS = [
    "The future of AI is",
    "def fibonacci(n):\n",
    "Monday, Tuesday, Wednesday, Thursday, Friday, Saturday, Sunday, Monday, Tuesday,",
]


def main() -> None:
    params = SamplingParams(temperature=0.0, max_tokens=48)
    with LLM("smollm2-135m", speculate="auto") as llm:
        for output in llm.generate(PROMPTS, params):
            answer = output.outputs[0]
            print(f"{output.prompt!r}\n  -> {answer.text!r}")
            print(
                f"  {len(answer.token_ids)} tokens in {answer.stats['steps']} passes, "
                f"{answer.stats['accepted']} of {answer.stats['drafted']} guesses accepted\n"
            )


if __name__ == "__main__":
    main()
