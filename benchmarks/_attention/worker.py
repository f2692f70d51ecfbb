"""One of the two measured processes: holds a role, builds cases, and times them when told to.

It is started with two file descriptors and answers each line of JSON with one. Standard output is not used:
torch_npu and MindSpeed print there.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import json
import math
import os
import platform
import random
import sys
import traceback
import warnings
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

__all__ = ["main"]

#: Seconds: a burst on a CPU is short enough to pass between two interruptions; a sample takes several.
BURST = {"cpu": 3e-4, "cuda": 1e-3, "npu": 1e-3}
SAMPLE = {"cpu": 4e-3, "cuda": 1e-2, "npu": 1e-2}
MOST_BURSTS = 16

#: Bytes by which the memory of a sample is moved at most.
MOVED = 16 << 20


class Worker:
    """The commands, one method each; arguments and results are JSON."""

    def __init__(self, *, mindspeed: bool, device: str, threads: int) -> None:
        from patchguard import cannless

        cannless.enable()  # before torch
        import torch

        from _attention.accelerator import Device
        from _attention.roles import Roles
        from patchguard.demo import cpu_megatron

        warnings.simplefilter("ignore")
        if device == "cpu" or not torch.accelerator.is_available():
            torch.set_num_threads(threads or 1)
        self.roles = Roles(mindspeed, device)
        self.device = Device(device)
        self.problem: Any = None
        self._random = random.Random()
        self._sampled = [0.0, 0.0]
        self._stack = contextlib.ExitStack()
        current = torch.cuda.current_device
        self._stack.enter_context(cpu_megatron())
        # On a CUDA device Megatron's own answer is right; elsewhere it has to be told.
        torch.cuda.current_device = current if self.device.kind == "cuda" else lambda: self.device.device

    def hello(self) -> dict[str, Any]:
        """Machine, versions, and what cannot be measured."""
        import torch

        guarded = importlib.import_module("patchguard.hosts").versions()
        names = ("patchguard", "torch", "torch_npu", "megatron-core", "mindspeed", "flash_attn_npu")
        versions = {"python": platform.python_version(), **{name: _version(name) for name in names}}
        versions["megatron-core"] = guarded.get("megatron", versions["megatron-core"])
        versions["mindspeed"] = guarded.get("mindspeed", versions["mindspeed"])
        return {
            "machine": {
                "platform": platform.platform(),
                "cores": os.cpu_count(),
                "device": self.device.name,
                "kind": self.device.kind,
                "threads": torch.get_num_threads(),
                "free_bytes": self.device.free_memory(),
            },
            "versions": {**{k: v for k, v in versions.items() if v}, **self.device.driver()},
            "unavailable": self.roles.unavailable(),
            "flash_attn_npu": self.roles.flash_attn,
        }

    def peak(self, dtype: str) -> float:
        """Operations a second of a matrix product."""
        from _attention.problem import DTYPES

        return self.device.peak(DTYPES[dtype])

    def bandwidth(self) -> float:
        """Bytes a second of a copy."""
        return self.device.bandwidth()

    def take(self, role: Any) -> None:
        """Become guarded or unguarded."""
        self.roles.take(role)

    def provide(self, provider: str) -> dict[str, Any]:
        """Have a provider bound."""
        return self.roles.provide(provider)

    def proxy(self, on: bool) -> None:
        """The control's proxy around what is bound."""
        self.roles.proxy(on)

    def prepare(self, case: dict[str, Any], seed: int, check: bool) -> dict[str, Any]:
        """Build a case, warm it up, and say how long a call takes; with ``check``, hold it to the reference."""
        from _attention.cases import Case
        from _attention.problem import Problem, digest

        self.problem = None
        self.device.empty()
        self.problem = Problem(Case.from_dict(case), self.roles.attention, self.device.device, seed)
        bits = digest(self.problem.results())
        answer: dict[str, Any] = {"digest": bits, "reproducible": bits == digest(self.problem.results())}
        if check:
            answer["check"] = asdict(self.problem.check())
        answer["seconds"] = min(self.device.bursts(self.problem.run, 1, 3))[0]
        return answer

    def plan(self, seconds: float) -> list[int]:
        """Calls a burst and bursts a sample, for a call of so many seconds."""
        calls = max(1, math.ceil(BURST[self.device.kind] / seconds))
        bursts = round(SAMPLE[self.device.kind] / (calls * seconds))
        return [calls, min(MOST_BURSTS, max(1, bursts))]

    def sample(self, calls: int, bursts: int) -> list[float]:
        """Seconds a call in the fastest of some bursts, from flushed caches: by the clock, and of this process.

        What disturbs a burst only makes it slower, and what is added to every call is in the fastest one too.
        """
        self.problem.move(64 * self._random.randrange(1, MOVED // 64))
        self.device.flush()
        took = self.device.bursts(self.problem.run, calls, bursts)
        self._sampled[0] += calls * sum(clock for clock, _ in took)
        self._sampled[1] += calls * sum(own for _, own in took)
        return [min(clock for clock, _ in took), min(own for _, own in took)]

    def sampled(self) -> list[float]:
        """Seconds spent in samples so far: by the clock, and of this process."""
        return self._sampled

    def invariance(self, provider: str, dtype: str, batch: int, mask: str, seed: int) -> dict[str, int]:
        """ULPs between a row alone and in a batch."""
        from _attention.problem import invariance

        return invariance(provider, dtype, batch, mask, self.roles.attention, self.device.device, seed)

    def release(self) -> None:
        """Drop the case."""
        self.problem = None
        self.device.empty()


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def main(options: str, incoming: int, outgoing: int) -> None:
    """Answer commands until the other side closes."""
    sys.argv[1:] = []  # MindSpeed reads the command line
    with os.fdopen(incoming, encoding="utf-8") as commands, os.fdopen(outgoing, "w", encoding="utf-8") as answers:

        def answer(work: Callable[[], Any]) -> Any:
            try:
                value = work()
                told = {"value": value if not isinstance(value, Worker) else None}
            except Exception as error:
                value = None
                told = {"error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()}
            print(json.dumps(told), file=answers, flush=True)
            return value

        worker = answer(lambda: Worker(**json.loads(options)))
        if worker is None:
            return
        for line in commands:
            name, arguments = json.loads(line)
            answer(lambda: getattr(worker, name)(**arguments))  # noqa: B023


if __name__ == "__main__":
    from pathlib import Path

    sys.path[0] = str(Path(__file__).resolve().parent.parent)
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
    os._exit(0)  # tearing torch down takes seconds
