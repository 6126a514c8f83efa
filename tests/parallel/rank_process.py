"""One rank of a two-process model, started by test_group: rank_process.py RANK FOLDER."""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from builders import plain_logits, tiny_weights
from hunch.models.load import load_decoder
from hunch.parallel.group import DistGroup


def main(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    store = f"file://{folder / 'store'}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
    group = DistGroup()
    work = json.loads((folder / "work.json").read_text())
    results = {}
    for name, config in work["configs"].items():
        model = load_decoder(tiny_weights(config), group=group)
        results[name] = (plain_logits(model, work["ids"]), model.weight_bytes)
    torch.save(results, folder / f"rank{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
