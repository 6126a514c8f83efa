"""`python -m hunch.entrypoints.openai.api_server`: vLLM's way to start the same server."""

from __future__ import annotations

import sys

from hunch.cli import main

if __name__ == "__main__":
    main(["serve", *sys.argv[1:]])
