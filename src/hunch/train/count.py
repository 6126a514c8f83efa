"""Count a phrase table in a process of its own: texts come in by stdin, the table goes to stdout.

It takes one thread, and whoever starts it gives it the lowest priority.
"""

from __future__ import annotations

import sys

import torch
from safetensors.numpy import save

from hunch.train.phrases import Counting, make_table
from hunch.train.texts import Texts


def count_bytes(data: bytes) -> bytes:
    """The table of texts, both as the files they could be."""
    texts, more = Texts.from_bytes(data)
    return bytes(save(make_table(texts, int(more["vocab_size"]), Counting()).files()))


def main() -> None:
    torch.set_num_threads(1)
    sys.stdout.buffer.write(count_bytes(sys.stdin.buffer.read()))


if __name__ == "__main__":
    main()
