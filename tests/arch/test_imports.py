"""The import table of the design, held by walking the source."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "hunch"

# Room -> rooms it may import from, besides itself. "torch" and "triton" are rooms too.
FREE = {"errors", "types"}
TABLE: dict[str, set[str]] = {
    "errors": set(),
    "checks": {"errors"},
    "types": {"errors", "checks", "outputs"},
    "outputs": {"types"},
    "vllm_modules": set(),
    "prompts": {"errors", "types"},
    "pooling": {"types"},
    "beams": {"errors", "prompts", "types"},
    "registry": set(),
    "arguments": set(),
    "config": {"errors", "registry", "types"},
    "compat": {"errors", "registry", "types", "config"},
    "hub": {"errors"},
    "text": {"types", "errors", "hub"},
    "chat": {"types", "errors"},
    "grammar": {"types", "errors"},
    "draft": {"torch", "types"},
    "kernels": {"torch", "triton", "errors"},
    "parallel.group": {"torch", "errors"},
    "layers": {"torch", "kernels", "parallel.group", "errors"},
    "sampling": {"torch", "draft", "kernels", "types", "errors"},
    "models": {
        "torch", "layers", "kernels", "parallel.group", "config", "registry", "errors", "hub",
    },
    "verify": {"torch", "draft", "sampling", "kernels", "errors"},
    "drafting": {
        "torch", "draft", "sampling", "config", "registry", "models", "layers", "kernels",
        "errors", "types",
    },
    "step": {
        "torch", "types", "draft", "errors", "config", "registry", "kernels", "parallel.group",
        "layers", "grammar", "sampling", "models", "verify", "drafting", "pooling",
    },
    "advice": set(),
    "adapt": {"config", "errors", "kernels"},
    "engine": {"types", "config", "errors", "advice", "pooling"},
    "server": {"types", "config", "errors", "chat", "compat", "pooling", "step.collector"},
    "train": {
        "torch", "models", "layers", "kernels", "sampling", "config", "errors", "registry", "hunch",
        "hub", "step.capture",
    },
    "step.collector": set(),
    "step.capture": {"torch"},
    "bench": {"torch", "hunch", "errors", "types", "step.collector"},
    # What measures a part alone, or makes a target of another cost, reaches inside.
    "bench.device": {
        "torch", "hunch", "errors", "types", "hub", "models", "kernels", "layers", "step",
    },
    # What measures one part alone reaches inside all of them.
    "bench.parts": {
        "torch", "hunch", "errors", "types", "hub", "models", "kernels", "step", "layers",
        "registry", "config", "engine", "text", "server", "parallel", "parallel.group", "llm",
        "step.collector", "step.capture", "train", "grammar", "drafting", "sampling",
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
    "llm_engine": {
        "compat", "config", "engine", "engine_args", "llm", "offline", "prompts", "text", "types",
    },
    "sglang": {"async_llm", "compat", "engine_args", "errors", "llm", "prompts", "types"},
    "offline": {"engine", "errors", "prompts", "types"},
    "async_llm": {
        "compat", "arguments", "config", "engine_args", "errors", "llm", "offline", "prompts",
        "text", "types",
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
        "step.collector",
        "step.capture",
        "bench.device",
        "bench.parts",
        "cli.doctor",
    ):
        if name == room or name.startswith(room + "."):
            return room
    return parts[1]


def imports_of(path: Path) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            found.append(node.module)
    return found


def forbidden_in(room: str, imported: list[str]) -> list[str]:
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
        if room not in ("__init__", "llm"):
            found[name] = forbidden_in(room, imports_of(path))
    assert {name: imported for name, imported in found.items() if imported} == {}


def test_what_the_table_forbids_is_found() -> None:
    known = ["numpy", "hunch.engine.blocks", "hunch.types", "hunch.advice"]
    assert forbidden_in("engine", known) == []
    others = ["torch", "hunch.step.runner", "hunch.step.collector", "hunch"]
    assert forbidden_in("engine", [*known, *others]) == others


def test_a_method_never_imports_another_method() -> None:
    from hunch.registry import DRAFTERS

    files = {entry.split(":")[0] for entry in DRAFTERS.values()}
    for path in sorted((SOURCE / "drafting").glob("*.py")):
        module = f"hunch.drafting.{path.stem}"
        if module in files and path.stem != "auto":  # the planner may hold the others
            assert not (set(imports_of(path)) & (files - {module})), path.name


def at_start(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements that run when a module is imported; not what is for types or `python -m`."""
    for node in body:
        if isinstance(node, ast.If):
            is_apart = "TYPE_CHECKING" in (test := ast.unparse(node.test)) or "__name__" in test
            yield from at_start(node.orelse if is_apart else node.body + node.orelse)
        elif isinstance(node, ast.Try):
            yield from at_start(node.body)
        else:
            yield node


def needed_at_start(files: dict[str, str]) -> dict[str, set[str]]:
    """Modules that each one imports before it is whole; `files`: their texts by name."""
    needed: dict[str, set[str]] = {}
    for name, text in files.items():
        needed[name] = set()
        for node in at_start(ast.parse(text).body):
            if isinstance(node, ast.Import):
                needed[name] |= {alias.name for alias in node.names} & set(files)
            elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
                found = {f"{node.module}.{alias.name}" for alias in node.names} & set(files)
                needed[name] |= found or {node.module} & set(files)
    return needed


def in_cycles(needed: dict[str, set[str]]) -> set[str]:
    """What is left when modules that need nothing more, or that nobody needs, are taken away."""
    left = {name: others - {name} for name, others in needed.items()}
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
        ): path.read_text()
        for path in modules()
    }
    assert in_cycles(needed_at_start(files)) == set()


def test_modules_that_import_each_other_are_found() -> None:
    files = {
        "a": "import b",
        "b": "from c import d",
        "c.d": "try:\n    import a\nexcept ImportError: ...",
        "c": "",
        "e": "import a",
        "f": "if TYPE_CHECKING:\n    import g",
        "g": "import f",
    }
    assert in_cycles(needed_at_start(files)) == {"a", "b", "c.d"}


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
