"""The server with OpenAI's own client: streamed, and what speculation did for it.

pip install openai
python examples/openai_client.py
"""

from local_server import server
from openai import OpenAI


def main() -> None:
    question = "List three colours and a thing of each colour."
    with server("--model", "smollm2-135m", "--max-model-len", "1024") as url:
        client = OpenAI(base_url=url, api_key="none")
        stream = client.chat.completions.create(
            model="smollm2-135m",
            messages=[{"role": "user", "content": question}],
            temperature=0,
            max_tokens=64,
            stream=True,
        )
        for chunk in stream:
            for choice in chunk.choices:
                print(choice.delta.content or "", end="", flush=True)
        whole = client.completions.create(
            model="smollm2-135m", prompt="One, two, three,", temperature=0, max_tokens=32
        )
        stats = (whole.model_extra or {})["hunch"]["stats"]
        print(f"\n{stats['tokens_per_pass']:.2f} tokens per pass")
        client.close()


if __name__ == "__main__":
    main()
