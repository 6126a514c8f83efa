"""Joules, where the machine tells them: an NVIDIA GPU's counter (NVML), an Intel CPU's (RAPL)."""

from __future__ import annotations

import ctypes
from pathlib import Path

RAPL = Path("/sys/class/powercap")


class EnergyMeter:
    """Energy between `start` and `stop` of everything that tells its own."""

    def __init__(self, device: str = "cpu", rapl: Path = RAPL) -> None:
        self._gpu = _Nvml.open() if device.startswith("cuda") else None
        self._packages = _rapl_packages(rapl)
        self.sources = [name for name, is_there in (
            ("NVML", self._gpu is not None), ("RAPL", bool(self._packages))
        ) if is_there]  # fmt: skip
        self._before: list[float] = []

    def _read(self) -> list[float]:
        values = [] if self._gpu is None else [self._gpu.joules()]
        return values + [package.joules() for package in self._packages]

    def start(self) -> None:
        self._before = self._read()

    def stop(self) -> float | None:
        """Joules since `start`; None where nothing tells."""
        after = self._read()
        if not after:
            return None
        total = 0.0
        for index, (before, now) in enumerate(zip(self._before, after, strict=True)):
            package = index - (self._gpu is not None)
            wrap = self._packages[package].wrap if package >= 0 else 0.0
            total += now - before + (wrap if now < before else 0.0)
        return total


class _Package:
    """A CPU package's counter, which starts again at zero after `wrap` joules."""

    def __init__(self, path: Path) -> None:
        self.path = path / "energy_uj"
        self.wrap = int((path / "max_energy_range_uj").read_text()) / 1e6

    def joules(self) -> float:
        return int(self.path.read_text()) / 1e6


def _rapl_packages(root: Path) -> list[_Package]:
    """Whole packages only (intel-rapl:0, not its parts); [] where they may not be read."""
    found = []
    for path in sorted(root.glob("intel-rapl:*")):
        if path.name.count(":") != 1:
            continue
        try:
            package = _Package(path)
            package.joules()
        except (OSError, ValueError):  # not readable by this user
            continue
        found.append(package)
    return found


class _Nvml:
    """The first GPU's energy counter, through the driver's own library."""

    def __init__(self, library: ctypes.CDLL, handle: ctypes.c_void_p) -> None:
        self._library, self._handle = library, handle

    @staticmethod
    def open() -> _Nvml | None:
        try:
            library = ctypes.CDLL("libnvidia-ml.so.1")
        except OSError:
            return None
        handle = ctypes.c_void_p()
        if library.nvmlInit_v2() or library.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(handle)):
            return None
        meter = _Nvml(library, handle)
        return meter if meter.millijoules() is not None else None

    def millijoules(self) -> int | None:
        value = ctypes.c_ulonglong()
        failed = self._library.nvmlDeviceGetTotalEnergyConsumption(
            self._handle, ctypes.byref(value)
        )
        return None if failed else value.value

    def joules(self) -> float:
        return (self.millijoules() or 0) / 1e3
