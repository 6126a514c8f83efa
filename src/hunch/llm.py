"""The offline front door, and the only place where the parts are put together."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from threading import Lock, RLock
from time import perf_counter
from typing import TYPE_CHECKING, Any, Self, Unpack

from hunch.adapt import adapter_for
from hunch.arguments import Arguments
from hunch.beams import BeamSearchOutput, BeamSearchParams, search_beams
from hunch.chat.structural_tag import as_grammar
from hunch.chat.turn import Wish, add_messages, chat_format, open_turn
from hunch.compat import VllmCalls, config_from_vllm, spec_from_vllm, unused_arguments, wishes_of
from hunch.config import DEFAULT_MODEL, Config, ModelConfig, load_drafter, say_once
from hunch.drafter_files import find_files
from hunch.engine.engine import Engine
from hunch.errors import CapacityError, ConfigError, ModelError, ModelFormatError
from hunch.hub import ModelFiles, resolve
from hunch.llm_engine import LLMEngine
from hunch.offline import OfflineRequests
from hunch.pooling import EmbeddingRequestOutput, embedding_of, pooling_params
from hunch.prompts import Params, Prompt, list_chats, list_prompts, params_for, progress
from hunch.step.collector import without_collector
from hunch.text.tokenizer import Tokenizer, load_tokenizer
from hunch.types import Capacity, RequestOutput, SamplingParams, StructuredOutput, recommended

if TYPE_CHECKING:
    import torch

    from hunch.models.target import Target
    from hunch.models.weights import Weights
    from hunch.step.runner import Runner

log = logging.getLogger("hunch")

Message = Mapping[str, Any]
LoadTarget = Callable[[Config, ModelFiles, "torch.device"], "Target"]


class LLM(VllmCalls):
    """A model ready to generate.

    >>> llm = LLM("smollm2-135m", speculate="ngram")
    >>> llm.generate("The future of AI is")[0].outputs[0].text

    Takes vLLM's arguments by their names, and hunch's own: `speculate`, `verifier`, `threads`.
    """

    def __init__(
        self,
        model: str = DEFAULT_MODEL,
        *,
        weights: Weights | None = None,
        **arguments: Unpack[Arguments],
    ) -> None:
        """`weights`: tensors to use in place of those in the model's files."""
        load = None if weights is None else partial(_load_target, weights=weights)
        self._open(config_from_vllm(model=model, **arguments), load_target=load)

    def _open(
        self,
        config: Config,
        tokenizer: Tokenizer | None = None,
        load_target: LoadTarget | None = None,
        lock: RLock | None = None,
    ) -> None:
        self.config = config
        self.tokenizer = tokenizer or load_text(config)
        self.engine = build_engine(config, self.tokenizer, load_target)
        self._requests = OfflineRequests(self.engine, self.tokenizer, lock)
        self.llm_engine = LLMEngine(config, self.engine, self._requests, self.tokenizer)

    def sibling(self, speculate: str, **arguments: Any) -> Self:
        """Another engine over the same copy of the weights that drafts in another way.

        >>> ngram = llm.sibling("ngram")

        It has a KV cache of its own. In several threads the two take turns, step by step.
        """
        target, lock = self.engine.runner.target, self._requests.lock  # type: ignore[attr-defined]
        spec = spec_from_vllm(speculate=speculate, **arguments)
        other = type(self).__new__(type(self))
        other._open(replace(self.config, spec=spec), self.tokenizer, lambda *_: target, lock)
        return other

    @classmethod
    def over(
        cls,
        target: Target | None,
        model: str,
        *,
        text: Tokenizer | None = None,
        is_greedy: bool = False,
        **arguments: Unpack[Arguments],
    ) -> Self:
        """An engine with arguments of its own over a target that another one loaded, if any."""
        llm, config = cls.__new__(cls), config_from_vllm(model=model, **arguments)
        load = None if target is None else lambda *_: target
        llm._open(replace(config, is_greedy=is_greedy), text, load)
        return llm

    def generate(
        self,
        prompts: Prompt | Iterable[Prompt] | None = None,
        params: Params = None,
        use_tqdm: bool | None = None,
        *,
        sampling_params: Params = None,
        **others: Any,
    ) -> list[RequestOutput]:
        """Answers in the order of the prompts: texts, token ids, or vLLM's prompt dicts."""
        prompts = others.pop("prompt_token_ids", None) if prompts is None else prompts
        wishes_of("generate", others, {})
        batch = list_prompts(prompts)
        return self._answer(batch, params_for(len(batch), params, sampling_params), use_tqdm)

    def _answer(
        self, batch: Sequence[Prompt], each: Sequence[SamplingParams], use_tqdm: bool | None
    ) -> list[RequestOutput]:
        ids = self._requests.add(batch, each, stream=False)
        done: dict[str, RequestOutput] = {}
        # Steps leave no cycles behind; looking for some would stop them for a tenth of a second.
        try:
            with progress(len(ids), use_tqdm) as advance, without_collector():
                for output in self._requests.run(ids):
                    if output.finished:
                        done[output.request_id] = output
                        advance()
        finally:
            self._requests.end(ids)
        return [done[request_id] for request_id in ids]

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: Params = None,
        use_tqdm: bool | None = None,
        *,
        sampling_params: Params = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **wishes: Any,
    ) -> list[RequestOutput]:
        """One conversation, or several: each is a list of {"role", "content"}.

        `tools` are OpenAI's, `wishes` fields of hunch.chat.turn.Wish; answers have a `message`.
        """
        batch = list_chats(messages)
        each = params_for(len(batch), params, sampling_params)
        given = wishes_of("chat", wishes, Wish.__dataclass_fields__)
        wish = Wish(tools=tools or (), template_values=chat_template_kwargs or {}, **given)
        template = chat_template or self.config.model.chat_template
        form = chat_format(self.config.model, self.tokenizer, template)
        how = {"template": template, "add_generation_prompt": add_generation_prompt}
        pairs = zip(batch, each, strict=True)
        turns = [open_turn(form, self.tokenizer, list(m), one, wish, **how) for m, one in pairs]
        decode = partial(self.tokenizer.decode, skip_special_tokens=False)
        ids, held = [t.prompt_ids for t in turns], [t.params for t in turns]
        prompts = [{"prompt": decode(one), "prompt_token_ids": one} for one in ids]
        outputs = self._answer(prompts, held, use_tqdm)
        add_messages(turns, outputs)
        return outputs

    def beam_search(
        self, prompts: Prompt | Sequence[Prompt], params: BeamSearchParams, **others: Any
    ) -> list[BeamSearchOutput]:
        """Each prompt's likeliest answers, found as vLLM finds them: slowly, without drafts."""
        wishes_of("beam_search", others, {})
        ask, max_len = partial(self._answer, use_tqdm=False), self.engine.runner.capacity.max_len
        return search_beams(list_prompts(prompts), params, self.tokenizer, max_len, ask)

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        pooling: str = "last",
        normalize: bool = True,
        use_tqdm: bool | None = None,
    ) -> list[EmbeddingRequestOutput]:
        """Texts as vectors: the state of each one's last token, or with "mean" of all its tokens.

        >>> llm.embed("Hello")[0].outputs.embedding

        States are those after the last norm. A model that was trained for it gives good ones.
        """
        batch = list_prompts(prompts)
        outputs = self._answer(batch, params_for(len(batch), pooling_params(pooling)), use_tqdm)
        return [embedding_of(output, normalize) for output in outputs]

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None
    ) -> Iterator[RequestOutput]:
        """The answer as it grows; leaving the loop early aborts the request."""
        ids = self._requests.add([prompt], params_for(1, params), stream=True)
        return self._requests.run(ids)

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        return self.tokenizer.render_chat(list(messages), template=self.config.model.chat_template)

    @property
    def has_chat_template(self) -> bool:
        return bool(self.config.model.chat_template or self.tokenizer.chat_template)

    def encode_turn(self, text: str) -> list[int]:
        """A user's first turn as it is served."""
        return self.encode_messages([{"role": "user", "content": text}])

    def encode_messages(self, messages: Sequence[Message]) -> list[int]:
        """`encode_chat`; to a model without a template the texts alone."""
        if self.has_chat_template:
            return self.encode_chat(messages)
        say_once("this model has no chat template: prompts are given to it as they stand")
        return self.tokenizer.encode("\n\n".join(str(m["content"]) for m in messages))

    def stats(self) -> dict[str, Any]:
        """Totals since the start, with the keys every hunch tool uses."""
        return self.engine.stats()

    def reset_cache(self, *, is_held_too: bool = False) -> bool:
        """Forget every cached prefix and what drafters keep of other requests."""
        with self._requests.lock:
            return self.engine.reset_cache(is_held_too=is_held_too)

    def get_tokenizer(self) -> Tokenizer:
        return self.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """How the model's makers would sample: its generation_config.json."""
        return SamplingParams(**recommended(self.tokenizer.generation_config))

    def close(self) -> None:
        if self._requests.is_own_process:
            self.engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@contextmanager
def _no_room_on_gpu(what: str) -> Iterator[None]:
    """CUDA's out of memory as an error of ours, with what to do."""
    import torch

    try:
        yield
    except torch.OutOfMemoryError as error:
        raise CapacityError(
            f"the GPU is out of memory: {what}. Give a smaller gpu_memory_utilization, "
            "max_num_batched_tokens, max_num_seqs or max_model_len, or a smaller model"
        ) from error


def load_text(config: Config) -> Tokenizer:
    """Tokenizer and chat template of the config's model; no torch."""
    model = config.model
    if model.tokenizer is not None:
        return load_tokenizer(resolve(model.tokenizer, directory=model.download_dir))
    return load_tokenizer(_find(model))


def _find(model: ModelConfig) -> ModelFiles:
    return resolve(model.model, revision=model.revision, directory=model.download_dir)


def build_engine(
    config: Config, tokenizer: Tokenizer | None = None, load_target: LoadTarget | None = None
) -> Engine:
    """Load the model and put the engine together."""
    from hunch.models.target import pick_device

    files = _find(config.model)
    if config.spec.is_lossy:
        log.warning("verifier=%r is LOSSY: it may change the text", config.spec.verifier)
    if config.spec.is_synthetic:
        log.warning("SYNTHETIC drafts: acceptance and speed are no drafter's, only the engine's")
    tokenizer = tokenizer or load_text(config)
    device = pick_device(config.model.device)
    for word in unused_arguments(config, device):
        say_once(word)
    if device.startswith("cuda"):
        config = replace(config, schedule=config.schedule.for_gpu())
    with _no_room_on_gpu("the model and its captured steps do not fit"):
        runner = _build_runner(config, files, tokenizer, device, load_target or _load_target)
    log.info("%s on %s; exact: %s", config.model.model, device, runner.capacity.exact)
    if bits := runner.capacity.activation_bits:
        other = "14 are nearer to float32" if bits == 8 else "8 are faster, less near to float32"
        log.info("activations have %d bits (%s: activation_bits)", bits, other)
    compile_grammar = _grammar_compiler(tokenizer)
    adapter = adapter_for(config.spec.options, runner, str(files.path))
    return Engine(config, runner, tokenizer, compile_grammar=compile_grammar, adapter=adapter)


def _grammar_compiler(tokenizer: Tokenizer) -> Callable[[StructuredOutput], Any]:
    """Loads the grammar engine with the first request that brings a grammar."""
    lock = Lock()
    made: list[Callable[[StructuredOutput], Any]] = []

    def compile_grammar(asked: StructuredOutput) -> Any:
        from hunch.grammar.compile import GrammarCompiler

        with lock:
            if not made:
                made.append(GrammarCompiler(tokenizer))
        return made[0](as_grammar(asked, tokenizer.special_tokens))

    return compile_grammar


def _build_runner(
    config: Config,
    files: ModelFiles,
    tokenizer: Tokenizer,
    device_name: str,
    load_target: LoadTarget,
) -> Runner:
    import torch

    from hunch.models.weights import open_weights
    from hunch.step.ahead import compiling_ahead
    from hunch.step.calibrate import is_finite, not_finite

    device = torch.device(device_name)
    if config.model.threads is not None:
        torch.set_num_threads(config.model.threads)
    with compiling_ahead(device) as ahead:
        runner = _load_runner(config, files, tokenizer, device, load_target)
        ahead.prepare(runner, progress, is_greedy=config.is_greedy)
    if not is_finite(runner):
        runner.close()
        raise ModelFormatError(f"{files.path}: {not_finite(open_weights(files))}")
    return runner


def _load_runner(
    config: Config,
    files: ModelFiles,
    tokenizer: Tokenizer,
    device: torch.device,
    load_target: LoadTarget,
) -> Runner:
    """The model, its drafter and a runner for them, with nothing captured."""
    from hunch.models.target import OverProcesses
    from hunch.step.assemble import assemble

    began = perf_counter()
    target = load_target(config, files, device)
    seconds = perf_counter() - began
    if isinstance(target, OverProcesses):
        target = target.with_draft_size(config.spec.draft_tensor_parallel_size)
    load_drafter(config.spec.method)
    spec = find_files(config.spec, files, device.type, config.model.download_dir)
    config = replace(config, spec=spec)
    runner = assemble(config, target, device, tokenizer.vocab, tokenizer, load_tokenizer)
    runner.capacity, runner.load_seconds = _with_sizes(runner, device), seconds
    if load_target is _load_target and isinstance(target, OverProcesses):
        runner.on_close = target.close
    return runner


def _with_sizes(runner: Runner, device: torch.device) -> Capacity:
    """What the models take; on a CPU memory for KV is taken only as it is used."""
    weights, target, capacity = runner.drafter.needs.weight_bytes, runner.target, runner.capacity
    num_bytes = capacity.drafter_bytes if device.type == "cuda" else weights
    share = weights / max(target.weight_bytes, 1)
    about = {"architecture": target.spec.architecture, "bytes": target.weight_bytes}
    return replace(capacity, drafter_bytes=num_bytes, drafter_share=share, model=about)


def _load_target(
    config: Config, files: ModelFiles, device: torch.device, weights: Weights | None = None
) -> Target:
    from hunch.models.target import load_target
    from hunch.models.weights import open_weights, with_overrides

    if config.parallel.num_ranks > 1:
        from hunch.parallel.split_target import load_split

        if weights is not None:
            raise ConfigError("weights in memory cannot be split over processes: give files")
        return load_split(config, files.path, device)
    weights = with_overrides(weights or open_weights(files), config.model.hf_overrides)
    try:
        return load_target(config.model, weights, device)
    except ModelError as error:
        if str(files.path) in str(error):
            raise
        raise type(error)(f"{files.path}: {error}") from None
