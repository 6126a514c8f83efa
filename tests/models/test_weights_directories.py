"""Directories in Hugging Face form: safetensors, sharded or not, and torch's own files."""

from __future__ import annotations

import io
import json
import os
import pickle
import zipfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from hunch.errors import ModelFormatError
from hunch.models.heads.files import read_config
from hunch.models.weights import open_weights
from hunch.models.weights.base import iterate, read_ahead
from hunch.models.weights.configs import unified_config
from hunch.models.weights.torch_file import load_torch_file

CONFIG = {"architectures": ["LlamaForCausalLM"], "hidden_size": 8}


def tensors(dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {f"model.layers.{i}.weight": torch.randn(4, 8).to(dtype) for i in range(4)}


def directory(path: Path) -> Path:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(CONFIG))
    return path


def shard(folder: Path, values: dict[str, torch.Tensor], kind: str = "safetensors") -> None:
    """Two files and their index."""
    names, stem = list(values), "model" if kind == "safetensors" else "pytorch_model"
    mapping = {}
    for number, part in enumerate((names[:2], names[2:])):
        file = f"{stem}-{number}.{kind}"
        save = save_file if kind == "safetensors" else torch.save
        save({name: values[name] for name in part}, folder / file)
        mapping |= dict.fromkeys(part, file)
    index = {"metadata": {}, "weight_map": mapping}
    (folder / f"{stem}.{kind}.index.json").write_text(json.dumps(index))


def test_every_shard_is_asked_for_and_nothing_that_is_not_there(tmp_path: Path) -> None:
    for name in ("a.safetensors", "b.safetensors", "notes.txt"):
        (tmp_path / name).write_bytes(b"x" * 1000)
    has_advice = hasattr(os, "posix_fadvise")
    assert read_ahead(tmp_path) == (2000 if has_advice else 0)
    assert read_ahead(tmp_path / "b.safetensors") == (1000 if has_advice else 0)
    assert read_ahead(tmp_path / "missing") == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("is_sharded", [False, True])
def test_safetensors(tmp_path, dtype, is_sharded) -> None:
    values, folder = tensors(dtype), directory(tmp_path / "m")
    if is_sharded:
        shard(folder, values)
    else:
        save_file(values, folder / "model.safetensors")
    weights = open_weights(folder)
    assert weights.config["hidden_size"] == 8
    assert sorted(weights.names()) == sorted(values)
    for name, value in values.items():
        assert weights.shape(name) == (4, 8)
        assert torch.equal(weights.tensor(name), value.float())
        assert torch.equal(weights.tensor(name, dtype), value)
        assert weights.packed(name) is None
    assert weights.nbytes >= sum(value.nbytes for value in values.values())


@pytest.mark.parametrize("share", [0.0, 0.05, 0.5, 0.98])
def test_safetensors_cut_short(tmp_path, share) -> None:
    folder = directory(tmp_path / "m")
    save_file(tensors(), folder / "model.safetensors")
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[: int(len(data) * share)])
    with pytest.raises(ModelFormatError, match=r"model\.safetensors.*download it again"):
        open_weights(folder)


def test_safetensors_with_a_broken_header(tmp_path) -> None:
    folder = directory(tmp_path / "m")
    save_file(tensors(), folder / "model.safetensors")
    data = bytearray((folder / "model.safetensors").read_bytes())
    data[:8] = b"\xff" * 8
    (folder / "model.safetensors").write_bytes(data)
    with pytest.raises(ModelFormatError, match="damaged"):
        open_weights(folder)


def test_a_missing_shard_is_named(tmp_path) -> None:
    folder = directory(tmp_path / "m")
    shard(folder, tensors())
    (folder / "model-1.safetensors").unlink()
    with pytest.raises(ModelFormatError, match=r"model-1\.safetensors is missing"):
        open_weights(folder)


@pytest.mark.parametrize("file", ["model-0.safetensors", "../secret.safetensors"])
def test_an_index_that_names_more_than_there_is(tmp_path, file) -> None:
    folder = directory(tmp_path / "m")
    shard(folder, tensors())
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    index["weight_map"]["ghost.weight"] = file
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelFormatError, match="secret" if "secret" in file else "ghost"):
        open_weights(folder)


@pytest.mark.parametrize("text", ["", "{", "[1, 2]", "\x00\xff"])
def test_a_broken_config(tmp_path, text) -> None:
    folder = directory(tmp_path / "m")
    save_file(tensors(), folder / "model.safetensors")
    (folder / "config.json").write_text(text)
    with pytest.raises(ModelFormatError, match=r"config\.json"):
        open_weights(folder)


def test_a_directory_without_weights(tmp_path) -> None:
    with pytest.raises(ModelFormatError, match="safetensors"):
        open_weights(directory(tmp_path / "m"))


# --- torch's own files --------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["pytorch_model.bin", "medusa_lm_head.pt"])
def test_torch_files(tmp_path, name) -> None:
    values, folder = tensors(), directory(tmp_path / "m")
    torch.save(values, folder / name)
    weights = open_weights(folder)
    for key, value in values.items():
        assert torch.equal(weights.tensor(key), value)
        assert weights.shape(key) == (4, 8)


def test_sharded_torch_files(tmp_path) -> None:
    values, folder = tensors(torch.float16), directory(tmp_path / "m")
    shard(folder, values, "bin")
    torch.save({"step": 5}, folder / "training_args.bin")  # beside them, and none of them
    weights = open_weights(folder)
    assert sorted(weights.names()) == sorted(values)
    assert all(torch.equal(weights.tensor(key, torch.float16), values[key]) for key in values)


def test_sharded_torch_files_that_are_not_whole(tmp_path) -> None:
    folder = directory(tmp_path / "m")
    shard(folder, tensors(), "bin")
    second = folder / "pytorch_model-1.bin"
    torch.save({"model.layers.2.weight": torch.ones(4, 8)}, second)
    with pytest.raises(ModelFormatError, match=r"names 1 tensors .* model\.layers\.3"):
        open_weights(folder)
    second.unlink()
    with pytest.raises(ModelFormatError, match=r"model-1\.bin is missing"):
        open_weights(folder)
    index = folder / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "../other.bin"}}))
    with pytest.raises(ModelFormatError, match="no file beside it"):
        open_weights(folder)


def test_a_shard_with_code_is_refused_and_not_run(tmp_path) -> None:
    folder, ran = directory(tmp_path / "m"), tmp_path / "ran"
    shard(folder, tensors(), "bin")
    torch.save({"a": Hostile(ran)}, folder / "pytorch_model-0.bin")
    with pytest.raises(ModelFormatError, match="run code"):
        open_weights(folder)
    assert not ran.exists()


def test_torch_files_of_the_old_kind(tmp_path) -> None:
    torch.save(tensors(), tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    assert torch.equal(
        load_torch_file(tmp_path / "old.pt")["model.layers.0.weight"],
        tensors()["model.layers.0.weight"],
    )


def test_safetensors_win_over_torch_files(tmp_path) -> None:
    folder = directory(tmp_path / "m")
    save_file({"a": torch.ones(2)}, folder / "model.safetensors")
    torch.save({"b": torch.ones(2)}, folder / "pytorch_model.bin")
    assert open_weights(folder).names() == ["a"]


class Hostile:
    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> object:
        return (Path.touch, (self.target,))


@pytest.mark.parametrize("is_zip", [True, False])
def test_a_pickle_with_code_is_refused_and_not_run(tmp_path, is_zip) -> None:
    path, ran = tmp_path / "evil.pt", tmp_path / "ran"
    torch.save({"a": Hostile(ran)}, path, _use_new_zipfile_serialization=is_zip)
    with pytest.raises(ModelFormatError, match=r"evil\.pt.*run code.*safetensors"):
        load_torch_file(path)
    assert not ran.exists()


def test_damaged_torch_files(tmp_path) -> None:
    torch.save(tensors(), tmp_path / "m.pt")
    data = (tmp_path / "m.pt").read_bytes()
    empty = io.BytesIO()
    with zipfile.ZipFile(empty, "w"):
        pass
    broken = [b"", data[:10], data[: len(data) // 2], b"not a model", empty.getvalue()]
    others = [pickle.dumps(value, protocol=2) for value in (5, {"a": 1}, {})]
    for number, content in enumerate([*broken, *others]):
        path = tmp_path / f"{number}.pt"
        path.write_bytes(content)
        with pytest.raises(ModelFormatError, match=rf"{number}\.pt"):
            load_torch_file(path)


def test_a_compressed_torch_file_is_not_unpacked(tmp_path) -> None:
    """A few kilobytes could become any number of gigabytes."""
    torch.save(tensors(), tmp_path / "m.pt")
    with (
        zipfile.ZipFile(tmp_path / "m.pt") as plain,
        zipfile.ZipFile(tmp_path / "bomb.pt", "w", zipfile.ZIP_DEFLATED) as packed,
    ):
        for name in plain.namelist():
            packed.writestr(name, plain.read(name))
    with pytest.raises(ModelFormatError, match=r"bomb\.pt.*compressed"):
        load_torch_file(tmp_path / "bomb.pt")


def test_tensors_that_are_none(tmp_path) -> None:
    torch.save({"a": torch.ones(1), "step": 5}, tmp_path / "m.pt")
    with pytest.raises(ModelFormatError, match="'step' is int"):
        load_torch_file(tmp_path / "m.pt")


# --- config and progress ------------------------------------------------------------------------


def test_newer_configs_read_like_older_ones() -> None:
    rope = {"rope_theta": 5e5, "rope_type": "llama3", "factor": 8.0}
    config = unified_config({"rope_parameters": rope, "dtype": "bfloat16"})
    assert config["rope_theta"] == 5e5
    assert config["rope_scaling"] == {"rope_type": "llama3", "factor": 8.0}
    assert config["torch_dtype"] == "bfloat16"
    plain = unified_config({"rope_parameters": {"rope_theta": 1e4, "rope_type": "default"}})
    assert plain["rope_theta"] == 1e4
    assert plain.get("rope_scaling") is None


@pytest.mark.parametrize("delay", [0.0, 100.0])
def test_iterate_gives_every_name_once(monkeypatch, delay) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    names = [str(i) for i in range(20)]
    assert list(iterate(names, delay=delay)) == names


def test_a_training_job_without_a_drafter_is_called_so(tmp_path: Path) -> None:
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "job.json").write_text("{}")
    for read in (open_weights, read_config):
        with pytest.raises(ModelFormatError, match="has written no drafter yet"):
            read(tmp_path)


def test_shards_without_an_index(tmp_path: Path) -> None:
    values, folder = tensors(), directory(tmp_path / "m")
    names = list(values)
    for number, part in enumerate((names[:2], names[2:]), start=1):
        file = folder / f"model-{number:05}-of-00002.safetensors"
        save_file({name: values[name] for name in part}, file)
    save_file({"other": torch.zeros(2)}, folder / "adapter_model.safetensors")
    weights = open_weights(folder)
    assert sorted(weights.names()) == sorted(names)
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ModelFormatError, match=r"2 safetensors files.*no model.safetensors.index"):
        open_weights(folder)
