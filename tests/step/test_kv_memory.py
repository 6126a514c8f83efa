"""On a CPU, KV takes a part of what a container may still use."""

from pathlib import Path

import pytest

from hunch.step.kv_cache import _free_ram


@pytest.mark.parametrize(
    ("limit", "used", "free"), [("3000000", "1000000", 2_000_000), ("1000", "5000", 0)]
)
def test_the_limit_of_a_container_counts(limit: str, used: str, free: int, tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text(f"{limit}\n")
    (tmp_path / "memory.current").write_text(f"{used}\n")
    assert _free_ram(tmp_path) == free


def test_without_a_limit_it_is_the_machines(tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("1\n")
    assert _free_ram(tmp_path) > 2**28
    assert _free_ram(tmp_path / "none") > 2**28
