"""The device: choosing it, its clock, its memory. All calls that only an accelerator answers are in this file.

CUDA and NPU go through the same lines, ``torch.cuda`` and ``torch.npu`` being alike. The NPU's have not run on
hardware; a test holds every ``self.backend`` and ``torch_npu`` call here to the signatures of both packages.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils.benchmark import timer

from patchguard.errors import HostError

__all__ = ["KINDS", "Device"]

KINDS = ("npu", "cuda", "cpu")
"""In the order of preference."""

#: Bytes written to empty the caches where the device does not tell their size: more than any has.
FLUSH = {"cpu": 64 << 20, "cuda": 256 << 20, "npu": 512 << 20}

#: The square matrices whose product measures the peak grow from the first side to the second, or until one product
#: takes this many seconds (a CPU without instructions for half types is a hundred times slower in those).
PEAK_SIDES, PEAK_SECONDS = (256, 8192), 0.02

#: Bytes copied to measure the bandwidth.
COPIED = {"cpu": 64 << 20, "cuda": 1 << 30, "npu": 1 << 30}


class Device:
    """One device of a kind of `KINDS`.

    Raises:
        HostError: there is no such device.
    """

    def __init__(self, kind: str = "auto") -> None:
        present = [name for name in KINDS if name == "cpu" or _is_there(name)]
        self.kind = present[0] if kind == "auto" else kind
        if self.kind not in present:
            raise HostError(f"there is no {self.kind} device here; present: {', '.join(present)}")
        # MindSpeed makes torch.cuda an alias of torch.npu, so an NPU process must be asked for the NPU first.
        self.device = torch.device(self.kind if self.kind == "cpu" else f"{self.kind}:0")
        self.backend: Any = None if self.kind == "cpu" else torch.get_device_module(self.device)
        self._flushed = torch.empty(_cache_size() if self.kind == "cpu" else FLUSH[self.kind], dtype=torch.uint8,
                                    device=self.device)  # fmt: skip

    @property
    def name(self) -> str:
        """As its maker calls it."""
        return _cpu_name() if self.backend is None else str(self.backend.get_device_name(0))

    def driver(self) -> dict[str, str]:
        """Version of what runs the device."""
        if self.kind == "cuda":
            return {"cuda": str(torch.version.cuda)}
        if self.kind == "npu":
            import torch_npu

            return {"cann": str(torch_npu.npu.utils.get_cann_version("CANN"))}
        return {}

    def free_memory(self) -> int:
        """Bytes that can be allocated."""
        if self.backend is not None:
            return int(self.backend.mem_get_info()[0])
        try:
            lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
            return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable"))
        except (OSError, StopIteration):
            return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2

    def empty(self) -> None:
        """Give memory that is held for later back."""
        if self.backend is not None:
            self.backend.empty_cache()

    def flush(self) -> None:
        """Push everything out of the caches, so that each sample starts alike."""
        self._flushed.fill_(1)

    def bursts(self, run: Callable[[], Any], calls: int, count: int) -> list[tuple[float, float]]:
        """Seconds a call of ``run``, in each of ``count`` bursts of ``calls`` calls.

        The first number is by device events where there are any, else by the clock of ``torch.utils.benchmark``;
        the second is what this process itself computed meanwhile, on all its threads.
        """
        took = []
        for _ in range(count):
            own = time.process_time()
            seconds = _host_seconds(run, calls) if self.backend is None else self._event_seconds(run, calls)
            took.append((seconds, (time.process_time() - own) / calls))
        return took

    def _event_seconds(self, run: Callable[[], Any], calls: int) -> float:
        start, end = self.backend.Event(enable_timing=True), self.backend.Event(enable_timing=True)
        self.backend.synchronize()
        start.record()
        for _ in range(calls):
            run()
        end.record()
        self.backend.synchronize()
        return float(start.elapsed_time(end)) / 1e3 / calls  # events count milliseconds

    def peak(self, dtype: torch.dtype) -> float:
        """Best operations a second of a square matrix product in ``dtype``."""
        side, seconds, best = PEAK_SIDES[0], 0.0, 0.0
        while side <= PEAK_SIDES[1] and seconds < PEAK_SECONDS:
            first, second = (torch.ones(side, side, dtype=dtype, device=self.device) for _ in range(2))
            seconds = min(self.bursts(lambda a=first, b=second: a @ b, 1, 4))[0]  # type: ignore[misc]
            best = max(best, 2 * side**3 / seconds)
            side *= 2
        return best

    def bandwidth(self) -> float:
        """Best bytes a second read and written by a copy of `COPIED` bytes."""
        source = torch.ones(COPIED[self.kind], dtype=torch.uint8, device=self.device)
        target = torch.empty_like(source)
        self.bursts(lambda: target.copy_(source), 1, 1)
        return float(2 * source.numel() / min(self.bursts(lambda: target.copy_(source), 1, 5))[0])


def _is_there(kind: str) -> bool:
    if kind == "npu":
        if importlib.util.find_spec("torch_npu") is None:
            return False
        import torch_npu

        return bool(torch_npu.npu.is_available())
    return bool(torch.cuda.is_available())


def _host_seconds(run: Callable[[], Any], calls: int) -> float:
    start = timer()
    for _ in range(calls):
        run()
    return float(timer() - start) / calls


def _cache_size() -> int:
    """Bytes of the last-level cache, as Linux tells it."""
    try:
        sizes = [path.read_text(encoding="ascii").strip() for path in _CACHES.glob("index*/size")]
        return max(int(size.rstrip("KM")) << (20 if size.endswith("M") else 10) for size in sizes)
    except (OSError, ValueError):
        return FLUSH["cpu"]


_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
