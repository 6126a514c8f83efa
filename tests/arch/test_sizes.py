"""Files and functions stay small enough to be read."""

from pathlib import Path

from arch.parsed import parsed
from hunch.registry import DRAFTERS, MODELS, RECIPES

SOURCE = Path(__file__).parents[2] / "src" / "hunch"
MAX_FILE, MAX_FUNCTION = 400, 60
FEW = 40  # lines below which a file needs a reason
REASONS = {
    "__main__.py": "python -m hunch",
    "launch_server.py": "SGLang's name of the server's module",
    "entrypoints/openai/api_server.py": "vLLM's name of the server's module",
    "garbage.py": "rooms that know no steps use it too",
    "byte_level.py": "tokenizers and drafts across vocabularies use it",
    "sampling/stop.py": "both forms of a step ask it",
    "chat/ids.py": "server and chat share it, and nothing else of it",
    "server/text.py": "a protocol that half of the server names",
    "pooling.py": "the engine and the step use it, which load no vectors of vLLM's",
}


def too_long(path: Path) -> list[str]:
    text = path.read_text()
    found = ["the file"] if text.count("\n") > MAX_FILE else []
    # A long signature is not a long function.
    found += [name for name, lines in parsed(path).functions if lines >= MAX_FUNCTION]
    return found


def test_sizes() -> None:
    found = {str(path.relative_to(SOURCE)): too_long(path) for path in SOURCE.rglob("*.py")}
    assert {path: names for path, names in found.items() if names} == {}


def test_the_test_finds_them(tmp_path: Path) -> None:
    file = tmp_path / "long.py"
    body = "    pass\n" * MAX_FUNCTION
    file.write_text("def short(): ...\n" * MAX_FILE + f"def long():\n{body}    pass\n")
    assert too_long(file) == ["the file", "long"]


def test_a_small_file_has_a_reason() -> None:
    few = {
        str(path.relative_to(SOURCE))
        for path in SOURCE.rglob("*.py")
        if path.read_text().count("\n") < FEW and path.name != "__init__.py"
    }
    tables = (*DRAFTERS.values(), *MODELS.values(), *RECIPES.values())  # one file, one method
    few -= {
        place.split(":")[0].replace(".", "/").removeprefix("hunch/") + ".py" for place in tables
    }
    assert few - set(REASONS) == set(), "join it with another, or say why it stands alone"
    assert set(REASONS) - few == set(), "no longer small, or gone"
