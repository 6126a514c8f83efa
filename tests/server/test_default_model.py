"""vLLM's documentation example, but for the module path, with the default model."""

from __future__ import annotations

import openai

from hunch import LLM, SamplingParams

PROMPT = "A robot may not injure a human being"


def test_the_client_lists_models_and_completes_with_the_offline_text(default_server: str) -> None:
    greedy = SamplingParams(temperature=0.0, max_tokens=24)
    sampled = SamplingParams(temperature=0.8, top_p=0.95, seed=7, max_tokens=24)
    with LLM("smollm2-135m", speculate="off", max_model_len=512) as llm:
        outputs = llm.generate([PROMPT, PROMPT], [greedy, sampled])
    wanted = [output.outputs[0].text for output in outputs]
    with openai.OpenAI(base_url=default_server, api_key="EMPTY") as client:
        model = client.models.list().data[0].id
        for params, text in zip((greedy, sampled), wanted, strict=True):
            whole = client.completions.create(
                model=model,
                prompt=PROMPT,
                temperature=params.temperature,
                top_p=params.top_p,
                seed=params.seed,
                max_tokens=24,
            )
            assert whole.choices[0].text == text
            chunks = client.completions.create(
                model=model,
                prompt=PROMPT,
                temperature=params.temperature,
                top_p=params.top_p,
                seed=params.seed,
                max_tokens=24,
                stream=True,
            )
            assert "".join(chunk.choices[0].text for chunk in chunks) == text
        chat = client.chat.completions.create(
            model=model, messages=[{"role": "user", "content": "Say hello."}], max_tokens=8
        )
        assert chat.choices[0].message.content
