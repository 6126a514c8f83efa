"""Every measurement of one part is named, says what it takes, and is one of the docs' commands."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from hunch.bench import parts
from hunch.cli import app
from hunch.errors import ConfigError, EngineError

FOLDER = Path(parts.__file__).parent
ROOT = Path(__file__).parents[2]


def test_every_module_is_named_and_every_name_is_in_the_docs() -> None:
    modules = {path.stem for path in FOLDER.glob("*.py")} - {"__init__"}
    assert set(parts.PARTS) == modules
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    text = "\n".join(page.read_text() for page in pages)
    assert [name for name in parts.PARTS if f"hunch bench part {name}" not in text] == []


@pytest.mark.parametrize("name", sorted(parts.PARTS))
def test_a_part_says_what_it_takes(name: str) -> None:
    pytest.importorskip("triton")
    found = CliRunner().invoke(app, ["bench", "part", name, "--help"])
    assert found.exit_code == 0
    assert f"hunch bench part {name}" in found.output


def test_streams_of_an_address_that_is_none() -> None:
    found = CliRunner().invoke(app, ["bench", "part", "streams", "--url", "nope"])
    assert found.exit_code == 2
    assert "say http://host:8000" in found.output


def test_a_parts_help_has_its_defaults_and_keeps_commands_on_lines_of_their_own() -> None:
    lines = CliRunner().invoke(app, ["bench", "part", "streams", "--help"]).output.splitlines()
    assert "    hunch serve --workers 4 --max-num-seqs 512 &" in lines
    assert any(line.endswith("[1 16 64 200 500]") for line in lines)
    assert any(line.endswith("processes that read [6]") for line in lines)


def test_parts_are_listed_and_an_unknown_one_is_refused() -> None:
    listed = CliRunner().invoke(app, ["bench", "part"]).output
    assert all(name in listed for name in parts.PARTS)
    with pytest.raises(ConfigError, match="no part 'kernel'"):
        parts.main_of("kernel")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize(
    "name", [name for name, part in parts.PARTS.items() if part.needs == "GPU"]
)
def test_a_part_for_a_gpu_is_refused_without_one(name: str) -> None:
    pytest.importorskip("triton")
    with pytest.raises(ConfigError, match=f"part '{name}' needs a GPU"):
        CliRunner().invoke(app, ["bench", "part", name], catch_exceptions=False)


def test_a_part_for_a_gpu_is_refused_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ModuleNotFoundError("No module named 'triton'", name="triton")

    monkeypatch.setattr(parts, "import_module", missing)
    with pytest.raises(ConfigError, match="part 'kernels' needs Triton"):
        parts.main_of("kernels")


def test_ranks_without_an_undisturbed_exchange_say_why() -> None:
    from hunch.bench.parts.ranks import Times, measured_link

    with pytest.raises(EngineError, match="others took the cores in nearly all of 7 tries"):
        measured_link([Times(num_tries=7)], 2)
    assert measured_link([Times(gathers=[(4.0, 1e-5), (4e6, 1e-3)])], 2).bytes_per_second > 1e9


def test_masks_are_told_apart_by_where_they_are_asked_for(tmp_path: Path) -> None:
    from hunch.bench.parts.masks import REST, STRING, answer, walk
    from hunch.text.tokenizer import load_tokenizer
    from tiny_models import write_tokenizer

    text, inside = answer(2)
    assert "".join(text[place] for place in sorted(inside)) == "copper kettleoak table"
    write_tokenizer(tmp_path)
    found = walk(load_tokenizer(tmp_path), 2)
    assert len(found[STRING][0]) + len(found[REST][0]) > len(text) / 3
    assert all(len(masks) == len(tokens) > 0 for masks, tokens in found.values())
