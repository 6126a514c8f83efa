"""What tests of several folders share; Triton's interpreter stands in for a GPU where none is."""

from __future__ import annotations

import gc
import importlib.util
import logging
import os
import signal
from collections.abc import Callable, Generator, Iterator

import pytest
import torch
from hypothesis import HealthCheck, settings

from hunch import hub
from hunch.errors import ModelError

# A busy machine is slow, and that is no fault of what is tested.
settings.register_profile(
    "any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("any machine")

# A shell lets what it starts in the background ignore Ctrl-C; tests and their programs must not.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

if not torch.cuda.is_available() and importlib.util.find_spec("triton"):
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when a kernel is defined
    from triton import knobs

    if knobs.runtime.interpret:
        from triton_interpreter import hasten_interpreter

        hasten_interpreter()


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Imports leave little to collect: the collector looks for it neither then nor in the tests.

    Training alone calls it a hundred times, and all modules together take it half a second.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()
        let_loggers_propagate()


def let_loggers_propagate() -> None:
    """pytest listens six times a test to every logger that does not: to dozens, torch's."""
    for name, logger in logging.root.manager.loggerDict.items():
        if isinstance(logger, logging.Logger) and name.startswith(("torch", "transformers")):
            logger.propagate = True


@pytest.fixture(autouse=True)
def logs_as_they_were() -> Iterator[None]:
    """A program that was run in this process leaves its levels and handlers to no other test."""
    loggers = [logging.getLogger(name) for name in (None, "hunch", "uvicorn")]
    before = [(log.level, log.propagate, list(log.handlers)) for log in loggers]
    yield
    for log, (level, propagate, handlers) in zip(loggers, before, strict=True):
        if log.level != level:  # which makes all loggers forget what they are enabled for
            log.setLevel(level)
        log.propagate = propagate
        for handler in list(log.handlers):
            if type(handler) is logging.StreamHandler and handler not in handlers:
                log.removeHandler(handler)


@pytest.fixture
def shell(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """A command's exit code, and what it wrote to both outputs."""
    from hunch.cli import main

    def call(*words: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as left:
            main(list(words))
        out, err = capsys.readouterr()
        return int(left.value.code or 0), out, err

    return call


@pytest.fixture(scope="session")
def default_files() -> hub.ModelFiles:
    """The default model's file: fetched once, then from the user's cache."""
    try:
        return hub.resolve("smollm2-135m", progress=False)
    except ModelError as error:
        pytest.fail(f"the default model is needed for this test: {error}")
