"""Joules, from the machine's counters: an NVIDIA GPU's (NVML), an Intel CPU's (RAPL)."""

from __future__ import annotations

import ctypes
from pathlib import Path

RAPL = Path("/sys/class/powercap")


class EnergyMeter:
    """The energy between `start` and `stop`, of all devices with a counter."""

    def __init__(self, device: str = "cpu", rapl: Path = RAPL) -> None:
        gpu = _Nvml.open() if device.startswith("cuda") else None
        found: dict[str, list[_Nvml | _Package]] = {"NVML": [gpu] if gpu is not None else []}
        found["RAPL"] = [*_rapl_packages(rapl)]
        self.sources = [name for name, counters in found.items() if counters]
        self._counters = [one for counters in found.values() for one in counters]
        self._before: list[float] = []

    def start(self) -> None:
        self._before = [one.joules() for one in self._counters]

    def stop(self) -> float | None:
        """Joules since `start`; None without a counter."""
        total = 0.0
        for counter, before in zip(self._counters, self._before, strict=True):
            now = counter.joules()
            total += now - before + (counter.wrap if now < before else 0.0)
        return total if self._counters else None


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

    wrap = 0.0  # it never starts again

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
