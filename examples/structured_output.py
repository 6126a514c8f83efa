"""Structured output: an answer that is held to a JSON schema, drafted tokens included.

python examples/structured_output.py
"""

import json

from hunch import LLM, SamplingParams

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer"},
        "city": {"type": "string", "maxLength": 20},
    },
    "required": ["name", "age", "city"],
    "additionalProperties": False,
}


def main() -> None:
    params = SamplingParams(temperature=0.0, max_tokens=80, structured_outputs={"json": SCHEMA})
    question = "Turn into JSON: Mia is 31 years old and lives in Porto."
    with LLM("smollm2-135m") as llm:
        (output,) = llm.chat([{"role": "user", "content": question}], params)
    answer = output.outputs[0]
    print(json.dumps(json.loads(answer.text), indent=2))
    print(f"{answer.stats['tokens_per_pass']:.2f} tokens per pass")


if __name__ == "__main__":
    main()
