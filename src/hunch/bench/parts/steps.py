"""A step's time in Python: its wall time less the native calls and matrix products within it.

One row on the CPU, the default model, drafts of 5 nodes. Drafters that come with hunch are used, if
there are some; EAGLE and MTP get random weights of the target's width, as a step's time does not
depend on the weights. `drafter` is the part of it within observe and propose; the rest is the
engine's own. Small torch operations count as Python: only hunch's kernels and torch's products are
subtracted.
"""

from __future__ import annotations

import cProfile
import json
import pstats
import tempfile
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
from safetensors.torch import save_file
from torch.nn import functional

from hunch import LLM, SamplingParams
from hunch.bench.parts import PartOptions
from hunch.kernels import native_library
from hunch.models.load import tensor_shapes
from hunch.models.spec import ModelSpec
from hunch.train.student import layer_config

METHODS = [
    *("off", "ngram", "suffix", "recycling", "prediction", "auto:draft=off"),
    *("draft", "mlp", "medusa", "eagle", "eagle3", "mtp"),
    *("draft:tree=dynamic", "mlp:tree=dynamic", "medusa:tree=static", "medusa:tree=dynamic"),
    *("eagle:tree=dynamic", "eagle3:tree=dynamic", "mtp:tree=dynamic"),
]
PROMPT = "Once upon a time, in a small town by the sea, there lived an old clockmaker who"
SAMPLING = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 0.8, "top_p": 0.95, "seed": 1},
}


class Meter:
    """Seconds spent inside calls that are not Python."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def wrap(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **more: Any) -> Any:
            started = perf_counter()
            result = call(*args, **more)
            self.seconds += perf_counter() - started
            return result

        return timed

    def install(self) -> None:
        assert native_library.is_available()
        library = native_library.library()
        for name, call in list(vars(library).items()):
            if name.startswith("hunch_"):
                setattr(library, name, self.wrap(call))
        functional.linear = self.wrap(functional.linear)
        torch.mm = self.wrap(torch.mm)


class Section:
    """The Python seconds of all calls of some functions."""

    def __init__(self, meter: Meter) -> None:
        self.meter, self.seconds = meter, 0.0

    def watch(self, owner: Any, name: str) -> None:
        call = getattr(owner, name)

        def timed(*args: Any) -> Any:
            native_before, started = self.meter.seconds, perf_counter()
            result = call(*args)
            self.seconds += perf_counter() - started - (self.meter.seconds - native_before)
            return result

        setattr(owner, name, timed)


def write_head(path: Path, form: str, spec: ModelSpec) -> None:
    """Random weights in EAGLE's or MiMo's form: one layer like the target's own."""
    spec = replace(spec, num_layers=1, windows=(None,))
    layer, width = "model.layers.0.", spec.width
    prefix = "layers.0." if form == "eagle" else "model.mtp_layers.0."
    shapes: dict[str, tuple[int, ...]] = {
        name.replace(layer, prefix): shape
        for name, shape in tensor_shapes(spec).items()
        if name.startswith(layer)
    }
    if form == "eagle":
        shapes["fc.weight"] = (width, 2 * width)
    else:
        shapes[f"{prefix}input_proj.weight"] = (width, 2 * width)
        for name in ("token_layernorm", "hidden_layernorm", "final_layernorm"):
            shapes[f"{prefix}{name}.weight"] = (width,)
    tensors = {name: torch.randn(shape) * 0.02 for name, shape in shapes.items()}
    model_type = "llama" if form == "eagle" else "mimo"
    config = {**layer_config(spec, {}), "model_type": model_type}
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    save_file(tensors, path / "model.safetensors")


def speculate_text(method: str, files: Path) -> str:
    """The method with its files and 5 nodes, or as many as it can draft."""
    name, *options = method.split(":")
    if name in ("eagle", "mtp"):
        options = [str(files / name), *options]
    if not any(option.startswith("tree") for option in options) and name in ("draft", "eagle"):
        options.append("num_nodes=5")
    return ":".join([name, *options])


def measure(
    llm: LLM, meter: Meter, num_tokens: int, rounds: int, profile: bool
) -> dict[str, dict[str, float]]:
    """Milliseconds per step and kind of request: Python in all, in the drafter, native."""
    drafter = Section(meter)
    runner: Any = llm.engine.runner
    for name in ("observe", "propose"):
        drafter.watch(runner.drafter, name)
    whole = Section(meter)
    whole.watch(llm.engine, "step")
    found: dict[str, dict[str, float]] = {}
    for sampling, more in SAMPLING.items():
        params = SamplingParams(max_tokens=num_tokens, ignore_eos=True, **more)  # type: ignore[arg-type]
        llm.generate(PROMPT, params, use_tqdm=False)  # the prompt is cached, buffers have grown
        rows = []
        for _ in range(rounds):
            meter.seconds = drafter.seconds = whole.seconds = 0.0
            profiler = cProfile.Profile() if profile else nullcontext()
            with profiler:
                (output,) = llm.generate(PROMPT, params, use_tqdm=False)
            if isinstance(profiler, cProfile.Profile):
                pstats.Stats(profiler).sort_stats("tottime").print_stats(25)
            steps = output.outputs[0].stats["steps"]
            rows.append([whole.seconds, drafter.seconds, meter.seconds, steps])
        found[sampling] = {
            key: 1000 * median(row[place] / row[3] for row in rows)
            for place, key in enumerate(("python", "drafter", "native"))
        }
    return found


def main(words: Sequence[str] = ()) -> None:
    parser = PartOptions("steps", __doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--only", help="methods, with commas between them")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--profile", action="store_true")
    args = parser.parse_args(words)
    meter = Meter()
    meter.install()
    print("milliseconds per step: Python in all (in the drafter); native")
    with tempfile.TemporaryDirectory() as folder:
        files = Path(folder)
        for method in args.only.split(",") if args.only else METHODS:
            name = method.split(":")[0]
            if name in ("eagle", "mtp") and not (files / name).exists():
                with LLM(args.model, speculate="off", max_model_len=256) as llm:
                    runner: Any = llm.engine.runner
                    write_head(files / name, name, runner.target.spec)
            with LLM(
                args.model,
                speculate=speculate_text(method, files),
                always_draft=True,
                max_num_seqs=1,
                max_model_len=512,
                threads=args.threads,
            ) as llm:
                found = measure(llm, meter, args.tokens, args.rounds, args.profile)
            state = [
                f"{sampling} {ms['python']:.2f} ({ms['drafter']:.2f}); {ms['native']:.2f}"
                for sampling, ms in found.items()
            ]
            print(f"{method:22} {'   '.join(state)}", flush=True)
