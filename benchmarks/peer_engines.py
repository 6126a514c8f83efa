"""The engines cpu_peers.py compares, each behind the same few calls: decode, one pass, logits.

Shape letters: M rows of a pass, V vocabulary.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import llama_cpp
import numpy as np
import torch
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

from hunch import LLM, SamplingParams
from hunch.models.weights.gguf import GgufWeights
from hunch.step.batch import gather
from hunch.types import Request, RowStart, RowWork

CONTEXT = 2048


@llama_cpp.llama_log_callback
def _say_nothing(level: int, text: bytes, data: Any) -> None:
    """llama.cpp's log, off. It is called until the end, so it lives as long as the module."""


@dataclass(slots=True)
class Answer:
    """A greedy answer; `seconds` run from its first token to its last."""

    tokens: list[int]
    seconds: float


class Hunch:
    """One method of hunch."""

    def __init__(self, model: str, method: str, threads: int, **arguments: Any) -> None:
        arguments = {"max_num_seqs": 8, "max_model_len": CONTEXT} | arguments
        self.llm = LLM(model, speculate=method, threads=threads, **arguments)
        self.runner: Any = self.llm.engine.runner

    def decode(
        self, prompt: list[int], max_tokens: int, *, is_warm: bool = False, **sampling: Any
    ) -> Answer:
        """Cached prefixes and drafters' stores are emptied first, unless the run is a warm one."""
        if not is_warm:
            self.llm.reset_cache()
        sampling = {"temperature": 0.0} | sampling
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, **sampling)
        began, tokens = 0.0, []
        for output in self.llm.stream(prompt, params):
            began = began or perf_counter()
            tokens = output.outputs[0].token_ids
        return Answer(list(tokens), perf_counter() - began)

    def decode_together(self, prompts: Sequence[list[int]], max_tokens: int) -> float:
        """Tokens per second of all prompts at once, while all of them decode."""
        engine, params = (
            self.llm.engine,
            SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True),
        )
        self.llm.reset_cache()
        for index, prompt in enumerate(prompts):
            engine.add(f"together-{index}", prompt, params)
        counts: dict[str, int] = {}
        began = first = 0.0
        while engine.has_work():
            for output in engine.step():
                counts[output.request_id] = len(output.outputs[0].token_ids)
            if len(counts) == len(prompts) and not began:
                began, first = perf_counter(), sum(counts.values())
        return (sum(counts.values()) - first) / (perf_counter() - began)

    @torch.inference_mode()
    def run(self, tokens: list[int], num_new: int, *, wants_all: bool = True) -> Any:
        """Seconds and logits of a pass over the last tokens, the others' KV being there."""
        runner, block = self.runner, self.runner.capacity.block_size
        request = Request(id="", prompt_ids=tokens, params=SamplingParams(), seed=0)
        start = RowStart(
            row=0,
            request=request,
            tokens=tokens,
            num_computed=(len(tokens) - num_new,) * len(runner.capacity.groups),
            blocks=list(range(-(-len(tokens) // block))),
        )
        runner.rows.start(start)
        work = [RowWork(row=0, num_tokens=num_new, num_nodes=0, max_draft=0)]
        began = perf_counter()
        batch = gather(runner.rows, work)
        hidden = runner.target.forward(batch.ids_T, batch.attn, runner.kv[0])
        last = hidden.last_TD if wants_all else hidden.last_TD[-1:]
        logits_MV = runner.target.logits(last)
        seconds = perf_counter() - began
        runner.rows.leave(0)
        return seconds, logits_MV

    def prefill(self, tokens: list[int]) -> float:
        """Seconds of a prompt as the engine runs it, chunks and first token included."""
        self.llm.reset_cache()
        params = SamplingParams(temperature=0.0, max_tokens=1)
        began = perf_counter()
        self.llm.generate([tokens], params, use_tqdm=False)
        return perf_counter() - began


class LlamaCpp:
    """llama.cpp: whole answers through its Python class, passes through its C functions."""

    def __init__(self, path: Path, threads: int) -> None:
        llama_cpp.llama_log_set(_say_nothing, ctypes.c_void_p(0))
        self.llm = llama_cpp.Llama(
            str(path),
            n_ctx=CONTEXT,
            n_threads=threads,
            n_threads_batch=threads,
            logits_all=True,  # prompt lookup needs them; one more row to copy costs plain nothing
            verbose=False,
        )
        self.num_vocab = self.llm.n_vocab()
        self.model, self.threads = self.llm._model.model, threads
        self.lookup = LlamaPromptLookupDecoding(num_pred_tokens=5)
        self.one, self.eight = self._context(1, CONTEXT), self._context(8, 8 * 512)
        self.batch = llama_cpp.llama_batch_init(CONTEXT, 0, 1)

    def _context(self, num_sequences: int, num_slots: int) -> Any:
        params = llama_cpp.llama_context_default_params()
        params.n_ctx, params.n_seq_max = num_slots, num_sequences
        params.n_threads = params.n_threads_batch = self.threads
        return llama_cpp.llama_init_from_model(self.model, params)

    def close(self) -> None:
        """Free what its own exit would free too late."""
        llama_cpp.llama_batch_free(self.batch)
        for context in (self.one, self.eight):
            llama_cpp.llama_free(context)
        self.llm.close()

    def decode(self, prompt: list[int], max_tokens: int, *, is_lookup: bool = False) -> Answer:
        """A prompt it has just answered is not read again: only decoding is timed."""
        self.llm.draft_model = self.lookup if is_lookup else None
        tokens: list[int] = []
        began = 0.0
        for token in self.llm.generate(prompt, temp=0.0):
            began = began or perf_counter()
            tokens.append(token)
            if len(tokens) == max_tokens:
                break
        return Answer(tokens, perf_counter() - began)

    def _decode(
        self, context: Any, rows: Sequence[tuple[int, int, int]], *, wants_all: bool = True
    ) -> np.ndarray:
        """One llama_decode over (token, position, sequence) rows."""
        batch = self.batch
        batch.n_tokens = len(rows)
        for index, (token, position, sequence) in enumerate(rows):
            batch.token[index], batch.pos[index] = token, position
            batch.n_seq_id[index], batch.seq_id[index][0] = 1, sequence
            batch.logits[index] = wants_all or index == len(rows) - 1
        if llama_cpp.llama_decode(context, batch):
            raise RuntimeError("llama_decode failed")
        num_rows = len(rows) if wants_all else 1
        size = num_rows * self.num_vocab
        logits = llama_cpp.llama_get_logits(context)
        return np.ctypeslib.as_array(logits, shape=(size,)).reshape(num_rows, self.num_vocab)

    def _cut(self, context: Any, length: int) -> None:
        memory = llama_cpp.llama_get_memory(context)
        llama_cpp.llama_memory_seq_rm(memory, -1, length, -1)

    def run(self, tokens: list[int], num_new: int, *, wants_all: bool = True) -> Any:
        """Seconds and logits of a pass over the last tokens, the others' KV being there."""
        first = len(tokens) - num_new
        self._cut(self.one, first)
        rows = [(token, first + i, 0) for i, token in enumerate(tokens[first:])]
        began = perf_counter()
        logits_MV = self._decode(self.one, rows, wants_all=wants_all)
        return perf_counter() - began, torch.from_numpy(logits_MV)

    def prefill(self, tokens: list[int]) -> float:
        return float(self.run(tokens, len(tokens), wants_all=False)[0])

    def decode_together(self, prompts: Sequence[list[int]], max_tokens: int) -> float:
        """Tokens per second of a sequence per prompt, one llama_decode per step."""
        self._cut(self.eight, 0)
        last = []
        for sequence, prompt in enumerate(prompts):
            rows = [(token, position, sequence) for position, token in enumerate(prompt)]
            last.append(int(self._decode(self.eight, rows, wants_all=False)[0].argmax()))
        began = perf_counter()
        for step in range(max_tokens - 1):
            rows = [(last[s], len(prompt) + step, s) for s, prompt in enumerate(prompts)]
            last = self._decode(self.eight, rows).argmax(-1).tolist()
        return len(prompts) * (max_tokens - 1) / (perf_counter() - began)


class Transformers:
    """transformers on the weights of the same file, in float32."""

    def __init__(self, path: Path) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM

        # Its own GGUF reader takes 20 s for the same tensors.
        weights = GgufWeights(path)
        config = {key: value for key, value in weights.config.items() if key != "architectures"}
        self.model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config)).eval()
        state = {name: weights.tensor(name) for name in weights.names()}
        missing, unexpected = self.model.load_state_dict(state, strict=False)
        if unexpected or not set(missing) <= {"lm_head.weight"}:  # which may be tied
            raise RuntimeError(f"transformers has other tensors: {missing}, {unexpected}")

    def decode(self, prompt: list[int], max_tokens: int) -> Answer:
        times: list[float] = []

        def watch(ids: Any, scores: Any, **_: Any) -> Any:
            times.append(perf_counter())
            return torch.zeros(len(ids), dtype=torch.bool)

        ids = torch.tensor([prompt])
        out = self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=max_tokens,
            min_new_tokens=max_tokens,
            pad_token_id=0,
            stopping_criteria=[watch],
        )
        return Answer(out[0, len(prompt) :].tolist(), times[-1] - times[0])


def windows(tokens: list[int], size: int) -> Iterator[list[int]]:
    """The text in pieces that are scored alone."""
    for first in range(0, len(tokens), size):
        yield tokens[first : first + size]
