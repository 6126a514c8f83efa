"""hunch, llama.cpp and transformers on a CPU: same file, prompts and threads, taking turns.

    make peers
    python benchmarks/cpu_peers.py --prompts-dir PROMPTS --json peers.json

PROMPTS holds JSON lines with `turns` or `prompt`: mt_bench.jsonl, humaneval.jsonl,
gsm8k_test.jsonl, cnn_dm.jsonl; a set of random words is made here. Without it hunch's own few
prompts stand in for them. Every figure is a median over rounds in which the engines take turns.
A long run can be cut into pieces: --sets and --skip choose, --merge adds to what FILE holds.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

SETS = ("mt_bench", "humaneval", "gsm8k_test", "cnn_dm")
RANDOM = "random_words"
METHODS = ("off", "ngram", "suffix", "auto")
ALONE = "suffix:phrases=off"  # suffix lookup in the request's own text, without the phrase table
WARM = "hunch/suffix (warm)"
ROWS = (1, 2, 4, 8, 16, 32)
LENGTH = 512  # tokens of context under the curve, and of the prompt of the prefill figure
QUICK_LENGTH = 128  # the same for a quick run
QUICK_PROMPT = 24  # it has no time to read long prompts with every method
SAMPLED = {"temperature": 0.8, "top_p": 0.95, "seed": 0}


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--model", default="smollm2-135m", help="a known name or a .gguf file")
    add("--prompts-dir", type=Path, help="folder of the prompt sets")
    add(
        "--quick",
        action="store_true",
        help="the ends of 4 short prompts per set, one round: a look, no measurement",
    )
    add("--sets", help="prompt sets to decode, commas between (all)")
    add("--ours", action="store_true", help="decode with hunch's methods alone")
    add("--limit", type=int, help="prompts per set (16; quick: 4)")
    add("--repeats", type=int, help="rounds (5; quick: 1)")
    add("--max-tokens", type=int, help="tokens per answer (128; quick: 10)")
    add("--threads", type=int, default=2)
    add("--skip", default="", help="parts to leave out, commas between: " + ", ".join(PARTS))
    add("--json", type=Path, help="write the figures here")
    add("--merge", action="store_true", help="keep what the file of --json holds already")
    args = parser.parse_args(arguments)
    args.limit = args.limit or (4 if args.quick else 16)
    args.repeats = args.repeats or (1 if args.quick else 5)
    args.max_tokens = args.max_tokens or (10 if args.quick else 128)
    args.length = QUICK_LENGTH if args.quick else LENGTH
    args.skip = set(filter(None, args.skip.split(",")))
    if unknown := args.skip - set(PARTS):
        parser.error(f"--skip {', '.join(sorted(unknown))}: not one of {', '.join(PARTS)}")
    return args


class Peers:
    """Every engine, loaded, and the prompts as token ids."""

    def __init__(self, args: argparse.Namespace) -> None:
        import torch
        from peer_engines import Hunch, LlamaCpp

        from hunch.hub import resolve

        torch.set_num_threads(args.threads)
        self.args = args
        self.path = resolve(args.model).path
        methods = METHODS if args.quick else (*METHODS, ALONE)
        self.hunch = {name: Hunch(str(self.path), name, args.threads) for name in methods}
        self.llama = LlamaCpp(self.path, args.threads)
        self.sets = read_sets(args, self.hunch["off"].llm)
        self.texts: list[list[int]] = []  # prompts with their plain answers


def read_sets(args: argparse.Namespace, llm: Any) -> dict[str, list[list[int]]]:
    """Token ids of each set's prompts. A quick run takes the shortest, and of those the ends."""
    from hunch.bench.workloads import PROMPTS
    from hunch.cli.options import prompt_ids, read_prompts

    if args.prompts_dir is None:
        records = {"built_in": PROMPTS}
    else:
        most = max(16, args.limit)
        records = {name: read_prompts(args.prompts_dir / f"{name}.jsonl", most) for name in SETS}
    sets = {name: [prompt_ids(llm, one) for one in found] for name, found in records.items()}
    if args.quick:
        shortest = {name: sorted(prompts, key=len) for name, prompts in sets.items()}
        sets = {name: [p[-QUICK_PROMPT:] for p in found] for name, found in shortest.items()}
    most = 2048 - args.max_tokens
    sets = {name: [p for p in prompts if len(p) <= most] for name, prompts in sets.items()}
    sets = {name: prompts[: args.limit] for name, prompts in sets.items()}
    sets |= {RANDOM: random_words(llm.tokenizer.vocab(), args.limit)}
    if args.sets is None:
        return sets
    if unknown := set(args.sets.split(",")) - set(sets):
        sys.exit(f"--sets {', '.join(sorted(unknown))}: not one of {', '.join(sets)}")
    return {name: sets[name] for name in args.sets.split(",")}


def random_words(vocab: dict[str, int], count: int, length: int = 48) -> list[list[int]]:
    """Prompts nobody can draft from: words in no order."""
    words = sorted(i for piece, i in vocab.items() if re.fullmatch(r"[Ġ▁ ][a-z]{3,}", piece))
    chooser = random.Random(0)
    return [chooser.choices(words, k=length) for _ in range(count)]


def measure_decode(peers: Peers) -> dict[str, Any]:
    """Tokens per second after the first token, and whether hunch's methods wrote the same."""
    args, hunch, llama = peers.args, peers.hunch, peers.llama
    calls: dict[str, Callable[[list[int]], Any]] = {
        f"hunch/{name}": lambda prompt, one=one: one.decode(prompt, args.max_tokens)
        for name, one in hunch.items()
    }
    calls[WARM] = lambda prompt: hunch["suffix"].decode(prompt, args.max_tokens, is_warm=True)
    if not args.ours:
        calls |= {
            "llama.cpp/off": lambda prompt: llama.decode(prompt, args.max_tokens),
            "llama.cpp/lookup": lambda prompt: llama.decode(
                prompt, args.max_tokens, is_lookup=True
            ),
        }
    speeds: dict[str, dict[str, float]] = {name: {} for name in calls}
    num_different = dict.fromkeys(calls, 0)
    for set_name, prompts in peers.sets.items():
        seconds: dict[str, list[float]] = {name: [] for name in calls}
        for prompt in prompts:
            rounds: dict[str, list[float]] = {name: [] for name in calls}
            for repeat in range(args.repeats):
                answers = {name: call(prompt) for name, call in calls.items()}
                plain = answers["hunch/off"].tokens
                for name, answer in answers.items():
                    rounds[name].append(answer.seconds)
                    num_different[name] += repeat == 0 and answer.tokens != plain
            peers.texts.append(prompt + plain)
            for name, times in rounds.items():
                seconds[name].append(median(times))
        for name, times in seconds.items():
            speeds[name][set_name] = (args.max_tokens - 1) * len(times) / sum(times)
    return {
        "decode": speeds,
        "equal": all(num_different[f"hunch/{name}"] == 0 for name in hunch)
        and num_different[WARM] == 0,
        "num_different": num_different,  # from hunch/off; peers round in their own ways
    }


def measure_transformers(peers: Peers) -> dict[str, Any]:
    """A few prompts: it is slow."""
    from peer_engines import Transformers

    args, engine = peers.args, Transformers(peers.path)
    max_tokens = min(args.max_tokens, 8 if args.quick else 64)
    sets = list(peers.sets.items())[: 1 if args.quick else None]
    speeds = {}
    for name, prompts in sets:
        times = [engine.decode(prompts[0], max_tokens).seconds for _ in range(args.repeats)]
        speeds[name] = (max_tokens - 1) / median(times)
    return {"decode": {"transformers/off": speeds}}


def _text(peers: Peers, num_tokens: int) -> list[int]:
    texts = peers.texts or [p for prompts in peers.sets.values() for p in prompts]
    tokens = [token for text in texts for token in text]
    return (tokens * (1 + num_tokens // len(tokens)))[:num_tokens]


def measure_curve(peers: Peers) -> dict[str, Any]:
    """Milliseconds of a pass over so many rows, logits of all of them included."""
    engines = {"hunch": peers.hunch["off"], "llama.cpp": peers.llama}
    length = peers.args.length
    text = _text(peers, length + max(ROWS))
    for engine in engines.values():
        engine.run(text[:length], length, wants_all=False)
    repeats = 3 * peers.args.repeats
    times = {name: {rows: [] for rows in ROWS} for name in engines}
    for _ in range(repeats):
        for rows in ROWS:
            for name, engine in engines.items():
                times[name][rows].append(engine.run(text[: length + rows], rows)[0])
    return {
        "curve": {
            name: {str(rows): 1000 * median(found) for rows, found in by_rows.items()}
            for name, by_rows in times.items()
        }
    }


def measure_prefill(peers: Peers) -> dict[str, Any]:
    engines = {"hunch": peers.hunch["off"], "llama.cpp": peers.llama}
    length = peers.args.length
    text, times = _text(peers, length), {name: [] for name in engines}
    for _ in range(peers.args.repeats):
        for name, engine in engines.items():
            times[name].append(engine.prefill(text))
    return {"prefill": {name: length / median(found) for name, found in times.items()}}


def measure_batch8(peers: Peers) -> dict[str, Any]:
    engines = {"hunch": peers.hunch["off"], "llama.cpp": peers.llama}
    prompts = [_text(peers, 8 * 32)[first : first + 32] for first in range(0, 8 * 32, 32)]
    speeds: dict[str, list[float]] = {name: [] for name in engines}
    for _ in range(peers.args.repeats):
        for name, engine in engines.items():
            speeds[name].append(engine.decode_together(prompts, peers.args.max_tokens))
    return {"batch8": {name: median(found) for name, found in speeds.items()}}


def measure_fidelity(peers: Peers) -> dict[str, Any]:
    """Distance to the float32 forward of the same file, by torch."""
    from peer_engines import Hunch, windows

    args = peers.args
    exact = Hunch(str(peers.path), "off", args.threads, dtype="float32", kernels="torch")
    engines = {"hunch": peers.hunch["off"], "llama.cpp": peers.llama}
    sums: dict[str, list[float]] = {name: [0.0, 0.0] for name in engines}
    text = _text(peers, 128 if args.quick else 2048)
    for window in windows(text, 256):
        truth_MV = exact.run(window, len(window))[1].log_softmax(-1)
        for name, engine in engines.items():
            guess_MV = engine.run(window, len(window))[1].log_softmax(-1)
            sums[name][0] += float((truth_MV.exp() * (truth_MV - guess_MV)).sum())
            sums[name][1] += float((truth_MV.argmax(-1) == guess_MV.argmax(-1)).sum())
    return {
        "fidelity": {
            name: {"kl": kl / len(text), "top1": top1 / len(text)}
            for name, (kl, top1) in sums.items()
        }
    }


def measure_sampling(peers: Peers) -> dict[str, Any]:
    """Plain decoding, greedy and at T=0.8, top_p=0.95."""
    engine, prompts = peers.hunch["off"], next(iter(peers.sets.values()))
    wishes: dict[str, dict[str, Any]] = {"greedy": {}, "sampled": SAMPLED}
    times: dict[str, list[float]] = {name: [] for name in wishes}
    for _ in range(max(3, peers.args.repeats)):
        for name, wish in wishes.items():
            answer = engine.decode(prompts[0], peers.args.max_tokens, **wish)
            times[name].append(answer.seconds / (len(answer.tokens) - 1))
    return {"sampling": {name: 1 / median(found) for name, found in times.items()}}


PROBE = """
    import re, sys, time
    from pathlib import Path
    import torch
    def peak(): return int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])
    before, began = peak(), time.perf_counter()
    from hunch import LLM, SamplingParams
    llm = LLM(sys.argv[1], threads=int(sys.argv[2]))
    llm.generate("The sea is", SamplingParams(temperature=0, max_tokens=1), use_tqdm=False)
    first = time.perf_counter() - began
    llm.generate([[5, 9, 7] * 650], SamplingParams(temperature=0, max_tokens=60), use_tqdm=False)
    print(first, (peak() - before) * 1024)
"""


def measure_start(peers: Peers) -> dict[str, Any]:
    """A new process: first token after `import torch`, and memory at 2k tokens beyond it."""
    command = [sys.executable, "-c", textwrap.dedent(PROBE), str(peers.path)]
    command.append(str(peers.args.threads))
    found = []
    for _ in range(peers.args.repeats):
        out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        found.append([float(word) for word in out.split()])
    size = peers.path.stat().st_size
    return {
        "start": {"first_token_seconds": median(one[0] for one in found)},
        "memory": {"bytes": median(one[1] for one in found), "file_bytes": size},
    }


PARTS: dict[str, Callable[[Peers], dict[str, Any]]] = {
    "decode": measure_decode,
    "transformers": measure_transformers,
    "curve": measure_curve,
    "prefill": measure_prefill,
    "batch8": measure_batch8,
    "fidelity": measure_fidelity,
    "sampling": measure_sampling,
    "start": measure_start,
}


def merge(report: dict[str, Any], found: dict[str, Any]) -> None:
    """Add a part's figures: of another set they stand beside earlier ones, else in their place."""
    for engine, speeds in found.pop("decode", {}).items():
        report["decode"].setdefault(engine, {}).update(speeds)
    if "equal" in found:
        found["equal"] = found["equal"] and report.get("equal", True)
        for name, count in report.get("num_different", {}).items():
            found["num_different"][name] = found["num_different"].get(name, 0) + count
    report |= found


def main(arguments: list[str]) -> int:
    args = parse(arguments)
    try:
        import llama_cpp  # noqa: F401
    except ImportError:
        print("llama-cpp-python is not installed here: run `make peers`", file=sys.stderr)
        return 2
    from peer_report import show

    peers = Peers(args)
    report: dict[str, Any] = {"decode": {}}
    if args.merge and args.json and args.json.exists():
        report = json.loads(args.json.read_text(encoding="utf-8"))
    for name, part in PARTS.items():
        if name in args.skip:
            continue
        began = perf_counter()
        found = part(peers)
        merge(report, found)
        print(f"{name}: {perf_counter() - began:.0f} s", file=sys.stderr)
        if args.json:
            args.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    show(report)
    peers.llama.close()
    return 0 if report.get("equal", True) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
