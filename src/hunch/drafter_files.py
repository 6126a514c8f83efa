"""A drafter's files: found like any model's, trained here, or those that come with hunch."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

from hunch.config import MERGE, SpecConfig
from hunch.drafters import shipped
from hunch.hub import ModelFiles, resolve
from hunch.hub.drafters import BESIDE_LOOKUPS, find_trained

log = logging.getLogger("hunch")


def find_files(
    spec: SpecConfig, target: ModelFiles, device: str = "cpu", download_dir: str | None = None
) -> SpecConfig:
    """The drafter's files found like any model's; `auto` with a path: the method they name.

    Without a path, `auto` takes what was trained here for this target, and a method that needs
    files those that come with hunch.
    """
    if spec.method == MERGE and "parts" in spec.options:
        found = [str(find_files(part, target, device, download_dir)) for part in spec.parts]
        return replace(spec, options={**spec.options, "parts": "+".join(found)})
    if spec.path is None:
        if spec.method in ("auto", "suffix"):
            spec = _with_phrases(spec, target, device)
        if spec.method == "auto":
            return _with_draft(spec, target, device, download_dir)
        path = shipped(spec.method, target.name, target.path)
        if path is None and spec.method == "mtp" and Path(target.path).is_dir():
            path = Path(target.path)  # its own layers
        return spec if path is None else replace(spec, path=str(path))
    if not Path(spec.path).exists():
        files = resolve(spec.path, revision=spec.revision, directory=download_dir)
        spec = replace(spec, path=str(files.path))
    if spec.method != "auto":
        return spec
    from hunch.models.heads.files import detect

    return replace(spec, method=detect(Path(str(spec.path))))


def _with_phrases(spec: SpecConfig, target: ModelFiles, device: str) -> SpecConfig:
    """Suffix lookup with a phrase table counted here, or that comes with hunch."""
    if spec.options.get("phrases", "auto") != "auto":
        return spec
    trained = find_trained(target.name, target.path, device, is_table=True)
    found = shipped("phrases", target.name, target.path) if trained is None else trained.path
    return spec if found is None else replace(spec, options={**spec.options, "phrases": str(found)})


def _with_draft(
    spec: SpecConfig, target: ModelFiles, device: str, download_dir: str | None
) -> SpecConfig:
    """`auto` with the network it may use: the one given, one trained here for this target, or the
    one that comes with hunch."""
    draft = spec.options.get("draft")
    if draft == "off":
        return spec
    if draft is None:
        trained = find_trained(target.name, target.path, device)
        if trained is not None:
            log.info("auto drafts with %s (%s, trained here)", trained.path, trained.method)
        if trained is not None and trained.method not in BESIDE_LOOKUPS:
            return replace(spec, method=trained.method, path=trained.path, options={})
        found = shipped("draft", target.name, target.path)
        if trained is None and found is None:
            return spec
        draft = str(found) if trained is None else trained.path
        if trained is not None:  # it was measured to pay
            spec = replace(spec, options={**spec.options, "any_size": "true"})
    elif not Path(draft).exists():
        draft = str(resolve(draft, directory=download_dir).path)
    return replace(spec, options={**spec.options, "draft": draft})
