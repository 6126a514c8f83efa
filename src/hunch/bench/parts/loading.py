"""Loading a large checkpoint, compared with reading its files: seconds of both, and the host's
memory.

Its files are written first, 15.5 GB in eight, or fewer with --layers, and removed at the end. Both
are timed with the files out of the system's cache (cold) and in it (cached).
"""

from __future__ import annotations

import json
import os
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from hunch.bench.environment import own_bytes
from hunch.bench.parts import PartOptions
from hunch.models.load import load_decoder, tensor_shapes
from hunch.models.spec import ModelSpec
from hunch.models.weights import open_weights

SHARD, PIECE = 2 * 10**9, 1 << 24  # bytes of a file, and of what is read of it at once
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 4096, "intermediate_size": 11008,
    "num_attention_heads": 32, "num_key_value_heads": 32, "vocab_size": 128256,
    "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "rope_theta": 1e4,
    "torch_dtype": "bfloat16", "tie_word_embeddings": False,
}  # fmt: skip


def write(folder: Path, config: dict[str, Any]) -> list[Path]:
    """The checkpoint's files, written side by side."""
    shards: list[dict[str, Tensor]] = [{}]
    for name, shape in tensor_shapes(ModelSpec.from_config(config)).items():
        if sum(tensor.nbytes for tensor in shards[-1].values()) > SHARD:
            shards.append({})
        shards[-1][name] = torch.full(shape, 0.5, dtype=torch.bfloat16)
    files = [folder / f"model-{number:05}.safetensors" for number in range(len(shards))]
    with ThreadPoolExecutor() as pool:
        list(pool.map(save_file, shards, files))
    pairs = zip(shards, files, strict=True)
    names = {name: file.name for shard, file in pairs for name in shard}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    (folder / "config.json").write_text(json.dumps(config))
    return files


def drop(files: list[Path]) -> None:
    """Drop files from the system's cache, once they are on the disk."""
    for file in files:
        with file.open("rb") as opened:
            os.fsync(opened.fileno())
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read(files: list[Path]) -> float:
    """Seconds to read all files, side by side."""

    def read_one(file: Path) -> None:
        piece = bytearray(PIECE)
        with file.open("rb", buffering=0) as opened:
            while opened.readinto(piece):
                pass

    began = time.perf_counter()
    with ThreadPoolExecutor(len(files)) as pool:
        list(pool.map(read_one, files))
    return time.perf_counter() - began


def load(folder: Path, device: torch.device) -> tuple[float, int]:
    """Seconds, and the most private memory of the host beside what was there."""
    before, is_done = own_bytes("RssAnon"), threading.Event()
    most = [before]

    def watch() -> None:
        while not is_done.wait(0.02):
            most[0] = max(most[0], own_bytes("RssAnon"))

    watcher = threading.Thread(target=watch)
    watcher.start()
    began = time.perf_counter()
    load_decoder(open_weights(folder), dtype="bfloat16", device=device)
    if device.type == "cuda":
        torch.cuda.synchronize()
    seconds = time.perf_counter() - began
    is_done.set()
    watcher.join()
    return seconds, most[0] - before


def main(words: Sequence[str] = ()) -> None:
    parser = PartOptions("loading", __doc__)
    parser.add_argument("--layers", type=int, default=33, help="33 take 15.5 GB")
    parser.add_argument("--folder", help="where the files are written; default: the system's")
    asked = parser.parse_args(words)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.zeros(1, device=device)  # the device's first use is not counted
    with tempfile.TemporaryDirectory(dir=asked.folder) as name:
        files = write(Path(name), CONFIG | {"num_hidden_layers": asked.layers})
        size = sum(file.stat().st_size for file in files)
        print(f"{size / 1e9:.1f} GB in {len(files)} files, to {device.type}")
        for state in ("cold", "cached"):
            if state == "cold":
                drop(files)
            reading = read(files)
            if state == "cold":
                drop(files)
            loading, memory = load(Path(name), device)
            print(
                f"{state}: reading {reading:.2f} s ({size / reading / 1e9:.1f} GB/s), loading "
                f"{loading:.2f} s: {loading / reading:.2f} of it; {memory / 1e9:.2f} GB of private "
                "memory at most",
                flush=True,
            )
