"""A draft's levels are timed in every form."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from hunch.bench.parts import levels
from hunch.models.source import RandomSource

pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # numpy's, in the interpreter
    pytest.mark.slow,
    pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU runs the part itself"),
]


def test_every_form_is_timed(monkeypatch, capsys) -> None:
    monkeypatch.setattr(levels, "RandomSource", lambda: RandomSource(0, torch.float16))
    monkeypatch.setitem(levels.GEOMETRIES, "1.5B", (32, 2, 2, 1, 16, 256, 64))
    monkeypatch.setattr(levels, "FORMS", (levels.Form(1, 1), levels.Form(1, 2)))
    words = ["--columns", "64", "--levels", "2", "--width", "2", "--again", "2", "--context", "8"]
    levels.main(words)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2
    assert all("each further one" in line for line in lines)
