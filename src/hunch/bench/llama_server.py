"""llama.cpp's own server from its prebuilt wheel: `python -m hunch.bench.llama_server FILE ...`.

It serves until standard input ends, so that it ends with the process that started it.
"""

from __future__ import annotations

import argparse
import sys

PREFIX = "COMMON_SPECULATIVE_TYPE_"


def main(words: list[str]) -> int:
    import xllamacpp

    spec_types = [
        name.removeprefix(PREFIX).lower().replace("_", "-")
        for name in xllamacpp.common_speculative_type.__members__
        if not name.endswith(("NONE", "COUNT"))
    ]
    parser = argparse.ArgumentParser(description="llama.cpp's server")
    parser.add_argument("model", help="a .gguf file")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--parallel", type=int, default=1, help="requests at once")
    parser.add_argument("--spec-type", choices=["off", *spec_types], default="off")
    args = parser.parse_args(words)
    params = xllamacpp.CommonParams()
    params.model.path = args.model
    params.port = args.port
    params.n_ctx = args.context * args.parallel
    params.n_parallel = args.parallel
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = args.threads
    params.verbosity = -1
    if args.spec_type != "off":
        name = PREFIX + args.spec_type.upper().replace("-", "_")
        params.speculative.types = [getattr(xllamacpp.common_speculative_type, name)]
    server = xllamacpp.Server(params)
    print(server.listening_address, flush=True)
    sys.stdin.read()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
