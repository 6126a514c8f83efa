"""Starts the real server over the engine of bytes; settings come as one JSON argument."""

from __future__ import annotations

import json
import os
import sys

from hunch.config import Config, ModelConfig, ScheduleConfig
from hunch.server import connections
from hunch.server.run import serve
from hunch.server.settings import Limits, ServeConfig


def main() -> int:
    settings = json.loads(sys.argv[1])
    seconds = os.environ.get("FAKE_HEADER_SECONDS")
    if seconds is not None:
        connections.HEADER_SECONDS = float(seconds)
    schedule = ScheduleConfig(max_num_seqs=settings.pop("max_num_seqs", 64))
    model = ModelConfig(
        model=settings.pop("model", "bytes"),
        max_model_len=settings.pop("max_model_len", None),
        reasoning_parser=settings.pop("reasoning_parser", "auto"),
    )
    config = Config(model=model, schedule=schedule)
    limits = Limits(**settings.pop("limits", {}))
    for name in ("models", "adapters"):
        settings[name] = tuple(map(tuple, settings.get(name, ())))
    for name in ("api_keys", "cors_origins", "allowed_hosts"):
        settings[name] = tuple(settings.get(name, ()))
    names = ("bytes", "alias")
    return serve(
        config,
        ServeConfig(served_model_names=names, limits=limits, **settings),
        engine_factory="server.fake_engine:build_engine",
        text_factory="server.fake_engine:load_text",
    )


if __name__ == "__main__":
    sys.exit(main())
