"""The import table of the design, held by walking the source."""

import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

from arch.parsed import Parsed, parse, parsed

SOURCE = Path(__file__).parents[2] / "src" / "hunch"

# Room -> rooms it may import from, besides itself. "torch" and "triton" are rooms too.
FREE = {"errors", "types"}
TABLE: dict[str, set[str]] = {
    "errors": set(),
    "checks": {"errors"},
    "types": {"errors", "checks", "outputs"},
    "outputs": set(),
    "byte_level": set(),
    "vllm_modules": set(),
    "prompts": {"errors", "types"},
    "prompt_files": {"errors"},
    "pooling": {"types"},
    "vectors": {"errors", "pooling", "torch", "types"},
    "beams": {"errors", "prompts", "types"},
    "registry": set(),
    "arguments": set(),
    "config": {"errors", "registry", "types"},
    "compat": {"errors", "registry", "types", "config"},
    "hub": {"errors"},
    "text": {"types", "errors", "hub", "byte_level"},
    "chat": {"types", "checks", "errors"},
    "grammar": {"types", "checks", "errors"},
    "draft": {"torch", "types"},
    "kernels": {"torch", "triton", "errors"},
    "parallel.group": {"torch", "errors"},
    "layers": {"torch", "kernels", "parallel.group", "errors"},
    "sampling": {"torch", "draft", "kernels", "types", "errors"},
    "models": {
        "torch", "layers", "kernels", "parallel.group", "config", "registry", "errors", "hub",
        "byte_level",
    },
    "verify": {"torch", "draft", "sampling", "kernels", "errors"},
    "drafting": {
        "torch", "draft", "sampling", "config", "registry", "models", "layers", "kernels",
        "drafters", "errors", "types",
    },
    "step": {
        "torch", "types", "draft", "errors", "config", "registry", "kernels", "parallel.group",
        "layers", "grammar", "sampling", "models", "verify", "drafting", "pooling",
    },
    "advice": set(),
    "adapt": {"config", "errors", "kernels"},
    "engine": {"types", "config", "errors", "advice", "pooling"},
    "server": {"types", "config", "errors", "chat", "compat", "pooling", "garbage"},
    "train": {
        "torch", "models", "layers", "kernels", "sampling", "config", "errors", "registry", "hunch",
        "hub", "prompt_files", "step.capture",
    },
    "garbage": set(),
    "step.capture": {"torch", "garbage"},
    "bench": {"torch", "hunch", "errors", "types", "garbage", "prompt_files"},
    # What measures a part alone, or makes a target of another cost, reaches inside.
    "bench.device": {
        "torch", "hunch", "errors", "types", "hub", "models", "kernels", "layers", "step",
    },
    # What measures one part alone reaches inside all of them.
    "bench.parts": {
        "torch", "hunch", "errors", "types", "hub", "models", "kernels", "step", "layers",
        "registry", "config", "engine", "text", "server", "parallel", "parallel.group", "loading",
        "garbage", "step.capture", "train", "grammar", "drafting", "sampling",
    },
    "parallel": {
        "torch", "types", "draft", "errors", "config", "kernels", "models", "step",
        "parallel.group", "step.capture",
    },
    "web": set(),
    "drafters": set(),
    "drafter_files": {"config", "drafters", "hub", "models"},
    "__main__": {"cli"},
    "cli": {
        "torch", "hunch", "bench", "config", "errors", "hub", "types", "text", "server", "compat",
        "train", "drafters", "advice", "bench.parts", "bench.device",
    },
    # What looks at the machine asks which kernels it has.
    "cli.doctor": {
        "torch", "hunch", "bench", "config", "errors", "hub", "types", "text", "train", "advice",
        "kernels", "cli", "bench.device", "drafters",
    },
    "integrations": {"compat", "config", "errors", "hub", "llm", "server", "types"},
    "engine_args": {"arguments", "compat", "config", "errors"},
    "llm": {
        "arguments", "beams", "chat", "compat", "config", "engine_args", "errors", "llm_engine",
        "loading", "models", "offline", "pooling", "prompts", "garbage", "text", "types", "vectors",
    },
    "llm_engine": {
        "compat", "config", "engine", "engine_args", "loading", "offline", "prompts", "text",
        "types",
    },
    "sglang": {
        "async_llm", "compat", "engine_args", "errors", "llm", "loading", "pooling", "prompts",
        "types", "vectors",
    },
    "offline": {"engine", "errors", "prompts", "types"},
    "async_llm": {
        "compat", "arguments", "config", "engine_args", "errors", "llm", "offline", "pooling",
        "prompts", "text", "types", "vectors",
    },
    "entrypoints": {"cli", "server", "compat", "errors", "llm", "config"},
    "launch_server": {"cli"},
}  # fmt: skip


def modules() -> list[Path]:
    return sorted(SOURCE.rglob("*.py"))


def room_of(module: str) -> str:
    """'hunch.drafting.ngram' -> 'spec'; 'hunch' -> 'hunch'."""
    parts = module.split(".")
    if len(parts) == 1:
        return "hunch"
    name = ".".join(parts[1:])
    for room in (
        "parallel.group",
        "step.capture",
        "bench.device",
        "bench.parts",
        "cli.doctor",
    ):
        if name == room or name.startswith(room + "."):
            return room
    return parts[1]


def forbidden_in(room: str, imported: Iterable[str]) -> list[str]:
    """What a module of this room imports and must not."""
    allowed, found = TABLE[room], []
    for name in imported:
        top = name.split(".")[0]
        other = room_of(name) if top == "hunch" else top
        is_own = other.split(".")[0] == room.split(".")[0]
        if top in ("torch", "triton", "hunch") and not is_own and other not in allowed:
            found.append(name)
    return found


def test_a_room_imports_only_what_the_table_allows() -> None:
    found = {}
    for path in modules():
        name = ".".join(path.relative_to(SOURCE).with_suffix("").parts)
        room = room_of(f"hunch.{name}")
        if room not in ("__init__", "loading"):  # these know all others
            found[name] = forbidden_in(room, parsed(path).modules)
    assert {name: imported for name, imported in found.items() if imported} == {}


def test_what_the_table_forbids_is_found() -> None:
    known = ["numpy", "hunch.engine.blocks", "hunch.types", "hunch.advice"]
    assert forbidden_in("engine", known) == []
    others = ["torch", "hunch.step.runner", "hunch.garbage", "hunch"]
    assert forbidden_in("engine", [*known, *others]) == others


def test_a_method_never_imports_another_method() -> None:
    from hunch.registry import DRAFTERS

    files = {entry.split(":")[0] for entry in DRAFTERS.values()}
    for path in sorted((SOURCE / "drafting").glob("*.py")):
        module = f"hunch.drafting.{path.stem}"
        if module in files and path.stem not in ("auto", "merge"):  # these hold others
            assert not (set(parsed(path).modules) & (files - {module})), path.name


def imported_by(files: dict[str, Parsed]) -> dict[str, set[str]]:
    """Modules of `files` that each one imports, also for types or within functions."""
    imported: dict[str, set[str]] = {}
    for name, file in files.items():
        imported[name] = set()
        for module, names in file.imports:
            found = {f"{module}.{each}" for each in names} & set(files)
            imported[name] |= found or {module} & set(files)
    return imported


def in_cycles(imported: dict[str, set[str]]) -> set[str]:
    """What is left when modules that import nothing, or that nobody imports, are taken away."""
    left = {name: others - {name} for name, others in imported.items()}
    while True:
        wanted = set().union(*left.values()) if left else set()
        gone = {name for name, others in left.items() if not others & set(left)}
        gone |= set(left) - wanted
        if not gone:
            return set(left)
        left = {name: others - gone for name, others in left.items() if name not in gone}


def test_no_modules_import_each_other() -> None:
    files = {
        ".".join(("hunch", *path.relative_to(SOURCE).with_suffix("").parts)).removesuffix(
            ".__init__"
        ): parsed(path)
        for path in modules()
    }
    assert in_cycles(imported_by(files)) == set()


def test_modules_that_import_each_other_are_found() -> None:
    files = {
        "a": "import b",
        "b": "from c import d",
        "c.d": "try:\n    import a\nexcept ImportError: ...",
        "c": "",
        "e": "import a",
        "f": "if TYPE_CHECKING:\n    import g",
        "g": "def run():\n    import f",
        "h": "import f",
    }
    found = imported_by({name: parse(text) for name, text in files.items()})
    assert in_cycles(found) == {"a", "b", "c.d", "f", "g"}


def loaded_by(statement: str) -> set[str]:
    code = f"import sys; {statement}; print(' '.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


@pytest.mark.parametrize(
    "module", ["hunch", "hunch.engine.engine", "hunch.text.tokenizer", "hunch.cli", "hunch.compat"]
)
def test_torch_free_rooms_load_no_torch(module: str) -> None:
    assert "torch" not in loaded_by(f"import {module}")


def test_import_hunch_is_quick() -> None:
    """It loads little, which costs 25 ms; by the clock that would depend on the machine."""
    assert len(loaded_by("import hunch") - loaded_by("pass")) < 60
