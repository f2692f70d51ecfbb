"""An embedded host that registers what real MindSpeed was recorded to: for ``--features recorded_host:NAME``.

`replay` gives a guard the registrations of one recorded config. Here features decide by the arguments, so that
any config can be planned and any two arguments tried together: where a recorded config asks for the same, each
feature does what it did there, else what it did alone, else what it does by default.
"""

from __future__ import annotations

import argparse
import contextlib
import enum
import importlib
from collections.abc import Callable
from typing import Any

from replay import Functions, ReplayedFeature, recording

import patchguard


class AttnBackend(enum.Enum):
    """Megatron's, for configs that name one; the replay does not need torch for it."""

    flash = 1
    fused = 2
    unfused = 3
    local = 4
    auto = 5


Entries = list[dict[str, Any]]


class RecordedFeature(ReplayedFeature):
    """A recorded feature; `host` is whose.

    `default` and `alone` are what it registers without and with its own argument; `special` is what it registers
    under recorded configs, where that is something else. It reads no more arguments than it has to.
    """

    host: str
    first = False
    default: Entries
    alone: Entries
    special: list[tuple[dict[str, Any], Entries]]

    def register_args(self, parser: argparse.ArgumentParser) -> None:
        if self.first:
            declare(self.host, parser)

    def is_need_apply(self, args: Any) -> bool:
        self.entries = self._entries(args)
        return bool(self.entries)

    def _entries(self, args: Any) -> Entries:
        for wanted, entries in self.special:
            if all(plain(getattr(args, name, None)) == value for name, value in wanted.items()):
                return entries
        value = getattr(args, self.feature_name, None)
        return self.alone if value and value != "disable" else self.default

    def record(self) -> None:
        """Fill `default`, `alone` and `special` from the recording."""
        found, own = recording(self.host), type(self).__name__
        table, configs = found["registrations"], found["configs"]

        def entries(indices: list[int]) -> Entries:
            return [table[i] for i in indices if table[i]["feature"] == own]

        self.default = entries(next(c for c in configs if c["name"] == "default")["registrations"])
        alone = next((a for a in found["alone"] if a["feature"] == own), {})
        self.alone = entries(alone.get("registrations", [])) or self.default
        self.special = []
        for config in sorted(configs, key=lambda c: -len(c["config"])):
            wanted, there = config["config"], entries(config["registrations"])
            on = wanted.get(self.feature_name) not in (None, False, "disable")
            if there != (self.alone if on else self.default):
                self.special.append((wanted, there))


def plain(value: Any) -> Any:
    return value.name if isinstance(value, enum.Enum) else value


def declare(host: str, parser: argparse.ArgumentParser) -> None:
    """The arguments that the recorded host declares."""
    entries = {entry["name"]: entry for entry in recording(host)["arguments"]}
    for entry in entries.values():
        if entry["action"] in ("StoreTrue", "StoreFalse"):
            parser.add_argument(f"--{entry['name']}", action="store_true", default=entry["default"])
        elif entry["action"] == "Store" and entry["nargs"] is None:
            kind = {"int": int, "float": float}.get(entry["type"], str)
            parser.add_argument(f"--{entry['name']}", type=kind, choices=entry["choices"], default=entry["default"])
    if "context_parallel_size" not in entries:
        parser.add_argument("--context_parallel_size", type=int, default=1)
    if "attention_backend" not in entries:
        parser.add_argument("--attention_backend", choices=list(AttnBackend), type=AttnBackend.__getitem__)


def features(host: str) -> list[RecordedFeature]:
    """The features of a recorded host, in its order."""
    functions, found = Functions(host), []
    for entry in recording(host)["features"]:
        cls = type(entry["feature"], (RecordedFeature,), {"__module__": entry["module"]})
        made = cls(entry["feature_name"], entry["optimization_level"])
        made.host, made.functions, made.entries, made.named = host, functions, [], True
        made.first = not found
        made.record()
        found.append(made)
    return found


def setup(host: str) -> Callable[[patchguard.Guard], None]:
    def register(guard: patchguard.Guard) -> None:
        # Before there are stand-ins for transformer_engine, which Megatron would take for the real one.
        with contextlib.suppress(ImportError):
            importlib.import_module("megatron.core")
        for feature in features(host):
            guard.add_feature(feature)

    return register


core_r0_16_0 = setup("mindspeed-core_r0.16.0")
core_r0_15_3 = setup("mindspeed-core_r0.15.3")
master = setup("mindspeed-master")
llm = setup("mindspeed_llm-26.1.0")
NAMES = {
    "mindspeed-core_r0.16.0": "core_r0_16_0",
    "mindspeed-core_r0.15.3": "core_r0_15_3",
    "mindspeed-master": "master",
    "mindspeed_llm-26.1.0": "llm",
}
