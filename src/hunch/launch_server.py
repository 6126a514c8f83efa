"""`python -m hunch.launch_server`: SGLang's way to start the same server, on its port."""

from __future__ import annotations

import sys

from hunch.cli import main

PORT = ("--port", "30000")

if __name__ == "__main__":
    words = sys.argv[1:]
    has_port = any(word.partition("=")[0] == "--port" for word in words)
    main(["serve", *words, *(() if has_port else PORT)])
