"""ik_llama.cpp behind as much of OpenAI's API as the bench needs; for measurements only.

python -m hunch.bench.ik_server MODEL.gguf --port 8001

It uses the wheel `ik-llama-cpp-python`, which has the library without its server and its
speculation: plain decoding, greedy. The wheel's sampling goes over the vocabulary in Python;
numpy's argmax replaces it, so that the library is measured and not the wrapper.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hunch.bench.transformers_server import encode, serve


class Model:
    """A GGUF file run by ik_llama.cpp, one request at a time."""

    name = "ik_llama.cpp"

    def __init__(self, path: Path, threads: int, context: int) -> None:
        from ik_llama_cpp import IkLlama
        from transformers import AutoTokenizer

        self.tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
        # Its flash attention is known to stop the process on machines without AVX-VNNI.
        self.llama = IkLlama(
            str(path), n_ctx=context, n_threads=threads, flash_attn=False, verbose=False
        )

    def stream(self, body: dict[str, Any], write: Callable[[str], None]) -> dict[str, int]:
        """Calls `write` with each piece of text; returns the usage."""
        ids = encode(self.tokenizer, body)
        context = self.llama._context
        context.kv_cache_clear()
        size = context._n_ubatch
        for first in range(0, len(ids), size):
            self._decode(ids[first : first + size], first)
        most, num_tokens = int(body.get("max_tokens") or 16), 0
        stops = () if body.get("ignore_eos") else (self.tokenizer.eos_token_id,)
        while num_tokens < most:
            token = self._likeliest()
            num_tokens += 1
            write(self.tokenizer.decode([token]))
            if token in stops or num_tokens == most:
                break
            self._decode([token], len(ids) + num_tokens - 1)
        return {"prompt_tokens": len(ids), "completion_tokens": num_tokens}

    def _decode(self, ids: list[int], position: int) -> None:
        from ik_llama_cpp import _ctypes_api as api
        from ik_llama_cpp._internals import make_batch_range

        batch = make_batch_range(ids, pos_start=position)
        problem = self.llama._context.decode(batch)
        api.llama_batch_free(batch)
        if problem:
            raise RuntimeError(f"ik_llama.cpp could not decode {len(ids)} tokens: {problem}")

    def _likeliest(self) -> int:
        import numpy as np

        logits = self.llama._context.get_logits(-1)
        return int(np.ctypeslib.as_array(logits, (self.llama._model.n_vocab,)).argmax())


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(description="ik_llama.cpp as a server, for measurements")
    parser.add_argument("model", type=Path, help="a .gguf file")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--context", type=int, default=4096)
    args = parser.parse_args(words)
    return serve({"": Model(args.model, args.threads, args.context)}, args.port)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
