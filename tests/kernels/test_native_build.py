"""Building the kernels: once per machine, and never silently missing."""

import os
import re
import subprocess
import sys

import pytest

from hunch.kernels import build


@pytest.fixture(autouse=True)
def _forget():
    build.load_library.cache_clear()
    yield
    build.load_library.cache_clear()


def test_without_a_compiler_one_warning_says_what_to_install(monkeypatch, tmp_path, caplog):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(build, "PREBUILT", tmp_path)
    assert build.load_library() is None
    assert build.load_library() is None  # said once
    assert len(caplog.messages) == 1
    assert re.search(r"no C\+\+ compiler.*apt install g\+\+", caplog.text)


def test_a_compiler_that_fails_is_named(monkeypatch, tmp_path, caplog):
    compiler = tmp_path / "broken"
    compiler.write_text("#!/bin/sh\necho cannot do that >&2\nexit 3\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("HUNCH_CACHE", str(tmp_path))
    assert build.load_library() is None
    assert "cannot do that" in caplog.text


@pytest.mark.parametrize("what", ["full", "a file"])
def test_where_kernels_cannot_be_kept_another_folder_is_advised(
    monkeypatch, tmp_path, caplog, what
):
    compiler = tmp_path / "compiler"
    compiler.write_text("#!/bin/sh\necho 'ld: link failed: No space left on device' >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setattr(build, "PREBUILT", tmp_path)
    monkeypatch.setenv("HUNCH_CACHE", str(tmp_path if what == "full" else compiler))
    assert build.load_library() is None
    (said,) = caplog.messages
    assert "cannot be kept in" in said
    assert said.endswith("name another folder in HUNCH_CACHE")
    assert "\n" not in said


def test_a_second_start_builds_nothing(monkeypatch, tmp_path):
    """The library is found again; other flags of the machine would make another."""
    if build.find_compiler() is None:
        pytest.skip("no C++ compiler")
    monkeypatch.setenv("HUNCH_CACHE", str(tmp_path))
    built = []

    def pretend(compiler, files, library, flags):
        built.append(library)
        library.touch()

    monkeypatch.setattr(build, "compile_library", pretend)
    compiler = build.find_compiler()
    first = build.build(compiler)
    assert build.build(compiler) == first
    monkeypatch.setattr(build, "_cpu", lambda: "another machine")
    assert build.build(compiler) != first
    assert len(built) == 2


def test_no_more_compilers_run_than_there_are_cores(monkeypatch, tmp_path):
    """Each takes memory, and a small machine has little."""
    compiler = tmp_path / "compiler"
    compiler.write_text(
        f"#!/bin/sh\ncd {tmp_path}\nmkdir $$.running\n"
        "set -- *.running $@\necho $@ | grep -o running | wc -l > $$.seen\n"
        'sleep 0.05\nrmdir $$.running\nfor last; do :; done\ntouch "$last"\n'
    )
    compiler.chmod(0o755)
    monkeypatch.setattr(build.os, "cpu_count", lambda: 2)
    files = [tmp_path / f"{number}.cpp" for number in range(6)]
    build.compile_library((str(compiler),), files, tmp_path / "library.so", ())
    assert (tmp_path / "library.so").exists()
    seen = [int(file.read_text()) for file in tmp_path.glob("*.seen")]
    assert len(seen) == 7  # the link too
    assert max(seen) <= 2


@pytest.mark.parametrize(("told", "expected"), [({}, "1"), ({"OMP_NUM_THREADS": "3,2"}, "3")])
def test_threads_follow_affinity_and_what_torch_is_told(told, expected):
    script = "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))}); "
    script += "from hunch.kernels.build import num_cores; print(num_cores())"
    others = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"}
    found = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True,
        env=others | told,
    )  # fmt: skip  # a process of its own: affinity would stay
    assert found.stdout.strip() == expected


X86_CPU = "avx2 fma f16c bmi2 movbe"
AVX512 = "avx512f avx512dq avx512cd avx512bw avx512vl"
ARM_CPU = "fp asimd asimddp asimdhp"


@pytest.mark.parametrize(
    ("machine", "features", "kind"),
    [
        ("x86_64", f"{X86_CPU} {AVX512} avx512_vnni", "avx512"),  # Cascade Lake, without VBMI
        ("x86_64", f"{X86_CPU} {AVX512}", "avx2"),  # Skylake has no VNNI
        ("x86_64", f"{X86_CPU} sse", "avx2"),
        ("x86_64", "sse sse2", None),
        ("aarch64", f"{ARM_CPU} sve i8mm bf16", "i8mm"),
        ("arm64", ARM_CPU, "neon"),
        ("aarch64", "fp asimd", None),
        ("riscv64", "", None),
    ],
)
def test_a_wheels_own_kernels_are_chosen_by_the_cpu(monkeypatch, tmp_path, machine, features, kind):
    """The best variant this CPU can run, and none that it cannot."""
    monkeypatch.setattr(build, "PREBUILT", tmp_path)
    monkeypatch.setattr(build.platform, "machine", lambda: machine)
    monkeypatch.setattr(build, "_cpu", lambda: f"Features : {features}")
    for each in ("avx512", "avx2", "i8mm", "neon"):
        (tmp_path / f"cpu-{each}.so").touch()
    expected = None if kind is None else tmp_path / f"cpu-{kind}.so"
    assert build.prebuilt(build.SOURCES) == expected


@pytest.mark.skipif(build.platform.machine() != "x86_64", reason="asks a compiler for x86")
@pytest.mark.parametrize("kind", ["avx512", "avx2"])
def test_a_cpu_is_asked_for_all_that_the_compiler_may_use(kind):
    """Else an instruction that it does not have would end the program."""
    compiler = build.find_compiler()
    if compiler is None:
        pytest.skip("no C++ compiler")
    flags, needed = build.VARIANTS["x86_64"][kind]
    command = [compiler, *flags, "-dM", "-E", "-x", "c++", os.devnull]
    macros = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    used = {name.lower() for name in re.findall(r"__(AVX\w+|FMA|F16C|BMI2|MOVBE|GFNI)__", macros)}
    assert used - {"avx"} == {name.replace("512_", "512") for name in needed}


@pytest.mark.parametrize(("told", "kind"), [("1\n", "i8mm"), ("0\n", "neon"), ("", "neon")])
def test_an_apple_cpu_is_asked_for_its_matrix_instructions(monkeypatch, tmp_path, told, kind):
    """An M1, or a system that does not know the question, has none."""
    monkeypatch.setattr(build, "PREBUILT", tmp_path)
    monkeypatch.setattr(build.platform, "machine", lambda: "arm64")
    monkeypatch.setattr(build.sys, "platform", "darwin")
    answer = subprocess.CompletedProcess((), 0, stdout=told)
    monkeypatch.setattr(build.subprocess, "run", lambda *args, **options: answer)
    for each in ("i8mm", "neon"):
        (tmp_path / f"cpu-{each}.so").touch()
    assert build.prebuilt(build.SOURCES) == tmp_path / f"cpu-{kind}.so"
