"""Drafters beside each other: what is asked for, and in which forms the engine drafts with it."""

from __future__ import annotations

from pathlib import Path

import pytest

from hunch.bench.parts.drafters import Taught, Wanted, main
from hunch.errors import ConfigError


def taught(method: str) -> Taught:
    return Taught(
        name=method, method=method, folder=Path("made"), num_parameters=1, steps=1, step_ms=1.0,
        tokens_per_second=1.0, tokens_per_pass=1.0, per_position=[0.5], unseen=None,
    )  # fmt: skip


def test_each_drafter_is_compared_in_the_forms_its_method_has() -> None:
    forms = ("chain", "tree", "auto")
    assert taught("draft").forms(forms) == {
        "draft, chain": "draft:made:num_nodes=5:adaptive=false",
        "draft, tree": "draft:made:tree=dynamic:num_nodes=15:depth=3:width=5:branch=5:"
        "adaptive=false",
        "draft, auto": "auto:draft=made:any_size=true",
    }
    assert taught("block").forms(forms) == {
        "block, chain": "dspark:made:adaptive=false",
        "block, tree": "dspark:made:tree=dynamic:num_nodes=15:adaptive=false",
        "block, auto": "auto:draft=made:any_size=true",
    }


def test_a_drafter_is_named_by_its_options_and_its_rate() -> None:
    wanted = Wanted.parse("draft:layers=2:units=0.25", 0.5)
    assert (wanted.method, wanted.options) == ("draft", {"layers": "2", "units": "0.25"})
    assert wanted.name == "draft layers=2 units=0.25 rate x 0.5"
    with pytest.raises(ConfigError, match="'2' is no KEY=VALUE"):
        Wanted.parse("draft:2", 1.0)
    with pytest.raises(ConfigError, match="no form 'block'"):
        main(["--forms", "chain,block"])
