"""What is said of a request once it is over: counts, how drafting went, which answers are best."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import zip_longest
from statistics import fmean
from typing import Any

from hunch.server.origins import origins_of
from hunch.server.problems import ProblemError
from hunch.types import CompletionOutput, RequestOutput

Json = dict[str, Any]


def ending(outputs: Sequence[RequestOutput]) -> Json:
    """What is said of a request once it is over: counts, and how drafting went."""
    return {
        "usage": usage(outputs),
        "metrics": {"speculative_decoding": speculation(outputs)},
        "hunch": report(outputs),
    }


def speculation(outputs: Sequence[RequestOutput]) -> Json:
    """How drafting went, under the names and with the types vLLM's responses have for it."""
    answers = [choice.stats for output in outputs for choice in output.outputs]
    drafts = [stats.get("drafts_by_accepted") or [] for stats in answers]
    histogram = [sum(counts) for counts in zip_longest(*drafts, fillvalue=0)]
    drafted, accepted = (
        sum(stats.get(k) or 0 for stats in answers) for k in ("drafted", "accepted")
    )
    num_drafts = sum(histogram)
    return {
        "mean_acceptance_length": 1 + accepted / num_drafts if num_drafts else 0.0,
        "draft_acceptance_rate": accepted / drafted if drafted else 0.0,
        "acceptance_histogram": histogram,
        "num_spec_steps": num_drafts,
        "num_accepted_draft_tokens": accepted,
        "num_draft_tokens": drafted,
        "num_spec_tokens": max(0, len(histogram) - 1),
    }


def check_ends(outputs: Sequence[RequestOutput]) -> None:
    """An answer the engine had to give up is an error: OpenAI's clients know no such ending."""
    for output in outputs:
        for choice in output.outputs:
            if choice.finish_reason == "abort":
                raise ProblemError(
                    400,
                    f"the answer could not be finished: {choice.stop_reason or 'it was aborted'}",
                    code="generation_failed",
                )


def best(output: RequestOutput, count: int) -> RequestOutput:
    """The answers with the highest mean logprob per token, best first; all where no more are."""
    if len(output.outputs) <= count:
        return output

    def score(choice: CompletionOutput) -> float:
        entries = zip(choice.token_ids, choice.logprobs or (), strict=False)
        return fmean([entry[token].logprob for token, entry in entries] or [0.0])

    ranked = sorted(output.outputs, key=score, reverse=True)[:count]
    ranked = [replace(choice, index=index) for index, choice in enumerate(ranked)]
    return replace(output, outputs=ranked)


def prompt_logprobs(output: RequestOutput) -> list[Json | None]:
    """vLLM's form: per prompt token its id and the likeliest ones; nothing for the first."""
    return [
        None
        if entry is None
        else {
            str(token): {
                "logprob": max(lp.logprob, -9999.0),
                "rank": lp.rank,
                "decoded_token": lp.decoded_token,
            }
            for token, lp in entry.items()
        }
        for entry in output.prompt_logprobs or ()
    ]


def usage(outputs: Sequence[RequestOutput]) -> Json:
    """Token counts; a prompt is counted once however many answers it gets."""
    num_prompt = sum(len(output.prompt_token_ids) for output in outputs)
    num_output = sum(len(choice.token_ids) for output in outputs for choice in output.outputs)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_output,
        "total_tokens": num_prompt + num_output,
        "prompt_tokens_details": {
            "cached_tokens": sum(output.num_cached_tokens for output in outputs)
        },
        "completion_tokens_details": _predicted(outputs),
    }


def _predicted(outputs: Sequence[RequestOutput]) -> Json:
    """How much of what clients expected was written; 0 and 0 where they expected nothing."""
    accepted = rejected = 0
    for output in outputs:
        for choice in output.outputs:
            counts = choice.stats.get("drafters", {}).get("prediction")
            if counts is not None:
                accepted += counts["accepted"]
                rejected += counts["drafted"] - counts["accepted"]
    return {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": rejected}


def report(outputs: Sequence[RequestOutput]) -> Json:
    """The `hunch` object: per answer its stats, its seed and, when asked, its tokens' origins."""
    answers: list[Json] = []
    for output in outputs:
        for choice in output.outputs:
            answer: Json = {"index": len(answers), "seed": choice.seed, "stats": choice.stats}
            if choice.trace is not None:
                answer["origins"] = origins_of(choice)
            answers.append(answer)
    stats = outputs[0].stats if len(outputs) == 1 else {}
    return {"stats": stats or answers[0]["stats"], "answers": answers}
