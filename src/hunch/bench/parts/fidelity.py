"""How near hunch's kernels and llama.cpp's come to float32, on the same file and page of text.

The reference is the float32 forward of the file's weights. llama.cpp's server gives its likeliest
tokens alone, so the same figure is computed for every engine: the KL over the NUM_LIKELY tokens
that llama.cpp named and all others together, which is at most the whole KL.

With --dtypes, on a GPU: weights in few bits by hunch's kernels, and expanded to 16 bits for torch's
products, both compared with a float32 pass over the same weights.

With --formats: the same for files of published formats, which are made of the model's weights, in
the next size that has whole blocks of all of them. mxfp4's experts are those of a random gpt-oss.
With --device cpu: the CPU's kernels, and llama.cpp's where it reads the format.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hunch.bench.device import gguf_blocks, published
from hunch.bench.device.enlarged import in_blocks
from hunch.bench.device.fidelity import PAGE, measure_kernels, scores
from hunch.bench.parts import PartOptions
from hunch.bench.peers import Peer, post, serving
from hunch.config import DEFAULT_MODEL, Config, ModelConfig
from hunch.errors import ConfigError
from hunch.hub import resolve
from hunch.loading import load_text
from hunch.models.load_target import load_target
from hunch.models.weights import open_weights

NUM_LIKELY = 1000
EXPERTS = "mxfp4-experts"
FORMATS = (*gguf_blocks.FORMATS, *published.FORMATS, EXPERTS)


def main(words: Sequence[str] = ()) -> None:
    parser = PartOptions("fidelity", __doc__)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--skip-llama", action="store_true")
    parser.add_argument("--dtypes", default="", help="say fp8,int8,int4, or keep for the file's")
    parser.add_argument("--formats", default="", help=f"all, or some of {', '.join(FORMATS)}")
    parser.add_argument("--device", default="cuda", help="of --dtypes and --formats")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(words)
    files = resolve(args.model)
    forms = FORMATS if args.formats == "all" else tuple(filter(None, args.formats.split(",")))
    if unknown := [form for form in forms if form not in FORMATS]:
        raise ConfigError(f"--formats {unknown[0]}: one of all, {', '.join(FORMATS)}")
    ids = load_text(Config(model=ModelConfig(model=args.model))).encode(PAGE)[: args.tokens]
    if args.dtypes:
        _show(_by_kernels(args.model, ids, args.dtypes.split(","), args.device), args.json)
        return
    if forms:
        found = {}
        for form in forms:
            with tempfile.TemporaryDirectory(prefix="hunch-") as folder:
                path = _write(Path(folder), form, files.path, args.device)
                known = ids
                if form == EXPERTS:  # to random weights all texts are alike
                    draw = random.Random(0)
                    known = [draw.randrange(published.EXPERTS_VOCAB) for _ in range(args.tokens)]
                if args.device == "cpu":
                    ask_llama = form in gguf_blocks.FORMATS and not args.skip_llama
                    row = _side_by_side(_on_cpu(path, known, ask_llama=ask_llama))
                else:
                    row = _side_by_side(_by_kernels(str(path), known, ["keep"], args.device))
            found[form] = row
            if not args.json:
                _show({form: row}, as_json=False)
        if args.json:
            _show(found, as_json=True)
        return
    _show(_on_cpu(files.path, ids, ask_llama=not args.skip_llama), args.json)


def _on_cpu(path: Path, ids: list[int], *, ask_llama: bool) -> dict[str, dict[str, float]]:
    log_p_TV = torch.cat(list(_log_probs(path, ids, dtype="float32")))
    likely = list(_ask_llama(str(path), ids)) if ask_llama else None
    found = {}
    for bits in (8, 14):
        log_q_TV = torch.cat(list(_log_probs(path, ids, activation_bits=bits)))
        found[f"hunch, {bits} bits"] = _compare(log_p_TV, log_q_TV, likely)
    if likely is not None:
        found["llama.cpp"] = _compare(log_p_TV, None, likely)
    return found


def _write(folder: Path, form: str, source: Path, device: str) -> Path:
    """A checkpoint in a format."""
    if form == EXPERTS:
        return published.write_experts(folder / "model", device)
    weights = in_blocks(open_weights(source), device)
    if form in gguf_blocks.FORMATS:
        return gguf_blocks.write_gguf(folder / "model.gguf", form, weights, source)
    return published.write_published(folder / "model", form, weights)


def _side_by_side(found: dict[str, dict[str, float]]) -> dict[str, float]:
    """Every figure of a format in one row."""
    return {
        f"{name.removeprefix('keep, ')}: {key}": value
        for name, row in found.items()
        for key, value in row.items()
    }


def _show(found: dict[str, dict[str, float]], as_json: bool) -> None:
    if as_json:
        print(json.dumps(found))
        return
    for name, row in found.items():
        words = "  ".join(f"{key} {value:.3g}" for key, value in row.items())
        print(f"{name:16} {words}", flush=True)


def _by_kernels(
    model: str, ids: list[int], dtypes: list[str], device: str
) -> dict[str, dict[str, float]]:
    found = {}
    for dtype in dtypes:
        ours, expanded = measure_kernels(model, ids, dtype, device=device)
        found[f"{dtype}, hunch"] = {"top1": ours.top1, "kl": ours.kl}
        found[f"{dtype}, expanded"] = {"top1": expanded.top1, "kl": expanded.kl}
    return found


def _log_probs(path: Any, ids: list[int], **how: Any) -> Iterator[Tensor]:
    target = load_target(ModelConfig(**how), open_weights(path), torch.device("cpu"))
    for logits_MV in scores(target, ids):
        yield logits_MV.log_softmax(1)


def _compare(
    log_p_TV: Tensor, log_q_TV: Tensor | None, likely: list[dict[int, float]] | None
) -> dict[str, float]:
    """log_q_TV None: llama.cpp's tokens are compared."""
    row: dict[str, float] = {}
    favourites = [max(named, key=lambda i: named[i]) for named in likely or []]
    told = torch.tensor(favourites) if log_q_TV is None else log_q_TV.argmax(1)
    row["top1"] = float((told == log_p_TV.argmax(1)).double().mean())
    if log_q_TV is not None:
        row["kl"] = float((log_p_TV.exp() * (log_p_TV - log_q_TV)).sum(1).double().mean())
    if likely is not None:
        total = 0.0
        for t, named in enumerate(likely):
            ids = torch.tensor(list(named))
            log_p = log_p_TV[t, ids].double()
            log_q = torch.tensor(list(named.values())).double()
            if log_q_TV is not None:
                log_q = log_q_TV[t, ids].double()
            total += _kl(log_p, log_q)
        row[f"kl over {NUM_LIKELY}"] = total / len(likely)
    return row


def _kl(log_p: Tensor, log_q: Tensor) -> float:
    rest_p, rest_q = 1 - log_p.exp().sum(), 1 - log_q.exp().sum()
    named = (log_p.exp() * (log_p - log_q)).sum()
    if min(rest_p, rest_q) <= 1e-9:
        return float(named)
    return float(named + rest_p * (rest_p / rest_q).log())


def _ask_llama(path: str, ids: list[int]) -> Iterator[dict[int, float]]:
    """llama.cpp's likeliest tokens after each token of the page, with their log-probabilities."""
    with start_llama(path) as (url, _):
        for num in range(1, len(ids) + 1):
            reply = post(
                f"{url}/completion",
                {"prompt": ids[:num], "n_predict": 1, "n_probs": NUM_LIKELY, "temperature": 0,
                 "cache_prompt": True, "samplers": []},
            )  # fmt: skip
            yield {
                t["id"]: t["logprob"] for t in reply["completion_probabilities"][0]["top_logprobs"]
            }


@contextmanager
def start_llama(path: str, threads: int = 2) -> Iterator[tuple[str, int]]:
    """llama.cpp's server: its address, and its process."""
    if find_spec("xllamacpp") is None:
        raise ConfigError(
            "llama.cpp's wheel is not installed: pip install xllamacpp, or measure without it "
            "(--skip-llama)"
        )
    words = ("-m", "hunch.bench.llama_server", path, "--port", "{port}", "--threads", str(threads))
    with serving(Peer("llama.cpp", (sys.executable, *words))) as (url, pid):
        yield url, pid
