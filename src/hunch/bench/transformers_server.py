"""transformers' generate behind as much of OpenAI's API as the bench needs; for measurements only.

python -m hunch.bench.transformers_server MODEL.gguf --port 8001 --methods off,lookup

One copy of the weights answers for all methods: plain decoding at http://127.0.0.1:8001/off, prompt
lookup at /lookup, assisted generation (with --draft) at /assisted.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any, Protocol

METHODS = ("off", "lookup", "assisted")
LOOKUP = 5  # tokens guessed by prompt lookup
MAX_BODY = 2**22


class Streams(Protocol):
    """An engine that answers one request at a time."""

    name: str

    def stream(self, body: dict[str, Any], write: Callable[[str], None]) -> dict[str, int]: ...


def encode(tokenizer: Any, body: dict[str, Any]) -> list[int]:
    """The prompt of a body, by the tokenizer's chat template where it has messages."""
    text = body.get("prompt")
    if "messages" in body:
        text = tokenizer.apply_chat_template(
            body["messages"], tokenize=False, add_generation_prompt=True
        )
    ids: list[int] = tokenizer(text, add_special_tokens=False).input_ids
    return ids


class Model:
    """A causal language model in float32, greedy, plain or assisted."""

    name = "transformers"

    def __init__(self, model: Any, tokenizer: Any, more: dict[str, Any]) -> None:
        self.model, self.tokenizer = model, tokenizer
        self.more = more  # further arguments of generate, to speculate

    def stream(self, body: dict[str, Any], write: Callable[[str], None]) -> dict[str, int]:
        """Calls `write` with each piece of text; returns the usage."""
        import torch
        from transformers.generation.streamers import BaseStreamer

        ids = torch.tensor([encode(self.tokenizer, body)])
        tokenizer = self.tokenizer

        class Pieces(BaseStreamer):  # type: ignore[misc]
            num_calls = 0

            def put(self, value: Any) -> None:
                self.num_calls += 1
                if self.num_calls > 1:  # the first call brings the prompt
                    write(tokenizer.decode(value.flatten()))

            def end(self) -> None:
                pass

        most = int(body.get("max_tokens") or 16)
        least = most if body.get("ignore_eos") else 1
        with torch.inference_mode():
            out = self.model.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=most,
                min_new_tokens=least, pad_token_id=0, streamer=Pieces(), **self.more,
            )  # fmt: skip
        return {"prompt_tokens": ids.shape[1], "completion_tokens": out.shape[1] - ids.shape[1]}


def load(path: Path, methods: Sequence[str], draft: Path | None) -> dict[str, Streams]:
    """The methods asked for, by name, over one copy of the weights."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    place: dict[str, Any] = {"pretrained_model_name_or_path": path}
    if path.suffix == ".gguf":
        place = {"pretrained_model_name_or_path": path.parent, "gguf_file": path.name}
    tokenizer = AutoTokenizer.from_pretrained(**place)
    model = AutoModelForCausalLM.from_pretrained(**place, dtype="float32").eval()
    more: dict[str, dict[str, Any]] = {"off": {}, "lookup": {"prompt_lookup_num_tokens": LOOKUP}}
    if "assisted" in methods:
        assistant = AutoModelForCausalLM.from_pretrained(draft, dtype="float32").eval()
        # A draft cut from its target has no embedding of its own, and shares the target's.
        assistant.set_input_embeddings(model.get_input_embeddings())
        assistant.set_output_embeddings(model.get_output_embeddings())
        more["assisted"] = {"assistant_model": assistant}
    return {method: Model(model, tokenizer, more[method]) for method in methods}


def handler(models: Mapping[str, Streams]) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def log_message(self, format: str, *args: Any) -> None:
            pass

        def do_GET(self) -> None:
            model = self._model()
            if model is not None:
                data = json.dumps({"object": "list", "data": [{"id": model.name}]}).encode()
                self._head("application/json")
                self.wfile.write(data)

        def do_POST(self) -> None:
            model, size = self._model(), int(self.headers.get("Content-Length") or 0)
            if model is None:
                return
            if size > MAX_BODY:
                self.send_error(413)
                return
            body = json.loads(self.rfile.read(size))
            self._head("text/event-stream")
            usage = model.stream(body, lambda piece: self._event({"choices": [{"text": piece}]}))
            self._event({"choices": [], "usage": usage})
            self.wfile.write(b"data: [DONE]\n\n")

        def _model(self) -> Streams | None:
            """The method of this path: /METHOD/v1/..., or /v1/... if there is only one."""
            found = models.get(self.path.split("/v1/")[0].strip("/"))
            if found is None:
                self.send_error(404)
            return found

        def _head(self, media_type: str) -> None:
            self.send_response(200)
            self.send_header("Content-Type", media_type)
            self.send_header("Connection", "close")
            self.end_headers()

        def _event(self, event: dict[str, Any]) -> None:
            self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
            self.wfile.flush()

    return Handler


def serve(models: Mapping[str, Streams], port: int) -> int:
    """Serve until the process is ended."""
    HTTPServer(("127.0.0.1", port), handler(models)).serve_forever()
    return 0


def main(words: list[str]) -> int:
    import torch

    parser = argparse.ArgumentParser(description="transformers as a server, for measurements")
    parser.add_argument("model", type=Path, help="a .gguf file or a model's directory")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--methods", default="off", help=f"commas between: {', '.join(METHODS)}")
    parser.add_argument("--draft", type=Path, help="the assistant model's directory")
    args = parser.parse_args(words)
    methods = args.methods.split(",")
    if set(methods) - set(METHODS) or (args.draft is None and "assisted" in methods):
        parser.error(
            f"--methods {args.methods}: some of {', '.join(METHODS)}; assisted needs --draft"
        )
    torch.set_num_threads(args.threads)
    return serve(load(args.model, methods, args.draft), args.port)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
