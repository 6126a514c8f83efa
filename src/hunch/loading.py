"""Where the parts are put together: from a config to an engine, its tokenizer and its model."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from threading import Lock
from time import perf_counter
from typing import TYPE_CHECKING, Any

from hunch.adapt import adapter_for
from hunch.chat.structural_tag import as_grammar
from hunch.compat import config_from_vllm, unused_arguments
from hunch.config import Config, ModelConfig, load_drafter, say_once
from hunch.drafter_files import find_files
from hunch.engine.engine import Engine
from hunch.errors import CapacityError, ConfigError, ModelError, ModelFormatError
from hunch.hub import ModelFiles, resolve
from hunch.prompts import progress
from hunch.text.tokenizer import Tokenizer, load_tokenizer
from hunch.types import Capacity, StructuredOutput

if TYPE_CHECKING:
    import torch

    from hunch.models.target import Target
    from hunch.models.weights import Weights
    from hunch.step.runner import Runner

log = logging.getLogger("hunch")

LoadTarget = Callable[[Config, ModelFiles, "torch.device"], "Target"]


@contextmanager
def _no_room_on_gpu(what: str) -> Iterator[None]:
    """Turn CUDA's error for too little memory into ours, which says what to do."""
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


def get_tokenizer(
    tokenizer_name: str,
    *,
    tokenizer_mode: str = "auto",
    trust_remote_code: bool = False,
    revision: str | None = None,
    download_dir: str | None = None,
) -> Tokenizer:
    """vLLM's and SGLang's: a model's tokenizer alone, as `LLM.get_tokenizer` gives it."""
    given = {"tokenizer_mode": tokenizer_mode, "trust_remote_code": trust_remote_code}
    given |= {"revision": revision, "download_dir": download_dir}
    return load_text(config_from_vllm(model=tokenizer_name, **given))


def _find(model: ModelConfig) -> ModelFiles:
    return resolve(model.model, revision=model.revision, directory=model.download_dir)


def build_engine(
    config: Config, tokenizer: Tokenizer | None = None, load_target: LoadTarget | None = None
) -> Engine:
    """Load the model and put the engine together."""
    from hunch.models.load_target import pick_device

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
        runner = _build_runner(config, files, tokenizer, device, load_target or load_target_of)
    log.info("%s on %s; exact: %s", config.model.model, device, runner.capacity.exact)
    if bits := runner.capacity.activation_bits:
        other = "14 are nearer to float32" if bits == 8 else "8 are faster, less near to float32"
        log.info("activations have %d bits (%s: activation_bits)", bits, other)
    compile_grammar = _grammar_compiler(tokenizer)
    adapter = adapter_for(config.spec.options, runner, str(files.path))
    return Engine(config, runner, tokenizer, compile_grammar=compile_grammar, adapter=adapter)


def _grammar_compiler(tokenizer: Tokenizer) -> Callable[[StructuredOutput], Any]:
    """A function that compiles a request's grammar; it loads the grammar engine on first use."""
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
    """Load the model and its drafter; returns a runner for them, with nothing captured yet."""
    from hunch.models.target import OverProcesses
    from hunch.step.assemble import assemble

    load_drafter(config.spec.method)  # what is not there is said before minutes of loading
    spec = find_files(config.spec, files, device.type, config.model.download_dir)
    config = replace(config, spec=spec)
    began = perf_counter()
    target = load_target(config, files, device)
    seconds = perf_counter() - began
    if isinstance(target, OverProcesses):
        target = target.with_draft_size(config.spec.draft_tensor_parallel_size)
    runner = assemble(config, target, device, tokenizer.vocab, tokenizer, load_tokenizer)
    runner.capacity, runner.load_seconds = _with_sizes(runner, device), seconds
    if load_target is load_target_of and isinstance(target, OverProcesses):
        runner.on_close = target.close
    return runner


def _with_sizes(runner: Runner, device: torch.device) -> Capacity:
    """The runner's capacity, with the bytes of its models.

    On a GPU those of the drafter include its KV; on a CPU memory for KV is taken as it is used.
    """
    weights, target, capacity = runner.drafter.needs.weight_bytes, runner.target, runner.capacity
    num_bytes = capacity.drafter_bytes if device.type == "cuda" else weights
    share = weights / max(target.weight_bytes, 1)
    about = {"architecture": target.spec.architecture, "bytes": target.weight_bytes}
    return replace(capacity, drafter_bytes=num_bytes, drafter_share=share, model=about)


def load_target_of(
    config: Config, files: ModelFiles, device: torch.device, weights: Weights | None = None
) -> Target:
    """Load the target that a config asks for: in this process, or over ranks."""
    from hunch.models.load_target import load_target
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
