"""A script written for vLLM; its first import is all that was changed.

python examples/vllm_script.py
"""

from hunch import LLM, SamplingParams  # was: from vllm import LLM, SamplingParams


def main() -> None:
    prompts = ["The future of AI is", "The capital of France is"]
    sampling_params = SamplingParams(temperature=0.8, top_p=0.95, seed=7, max_tokens=32)
    llm = LLM(
        model="smollm2-135m",
        tensor_parallel_size=1,
        speculative_model="[ngram]",
        num_speculative_tokens=5,
        ngram_prompt_lookup_max=4,
    )
    for output in llm.generate(prompts, sampling_params):
        print(f"Prompt: {output.prompt!r}, generated: {output.outputs[0].text!r}")


if __name__ == "__main__":
    main()
