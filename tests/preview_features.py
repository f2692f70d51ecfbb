"""Features for plans made in a process of their own: ``--features preview_features:register``.

They need neither torch nor Megatron: their targets are made up. Each shows one thing that a plan can find.
"""

from __future__ import annotations

import argparse
import enum
import time
from typing import Any

import patchguard


class Backend(enum.Enum):
    flash = 1
    eager = 2


def first_forward(self: Any) -> str:
    return "first"


def second_forward(self: Any) -> str:
    return "second"


def third_forward(self: Any) -> str:
    return "third"


def timing_wrapper(function: Any) -> Any:
    return function


class NewAttention:
    def forward(self) -> str:
        return "class"


class Base(patchguard.Feature):
    """Registers `function` for `target` when its argument is on."""

    target = "pk_plan.model.Attention.forward"
    function: Any = None
    force = False

    def register_patches(self, patch_manager: Any, args: Any) -> None:
        patch_manager.register_patch(self.target, type(self).function, self.force, create_dummy=True)


class FirstFeature(Base):
    function = first_forward

    def register_args(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--first", action="store_true")
        parser.add_argument("--parallel-size", type=int, default=1)
        parser.add_argument("--backend", type=Backend.__getitem__, choices=list(Backend), default=None)

    def validate_args(self, args: Any) -> None:
        if args.first and int(args.parallel_size) != 1:
            raise AssertionError("--first does not support parallel sizes yet.")
        if args.first and getattr(args, "checked", False) and args.hidden_size % 2:
            raise AssertionError("odd")


class SecondFeature(Base):
    function = second_forward

    def validate_args(self, args: Any) -> None:
        # This one fails for everybody: nothing that a config has done.
        raise RuntimeError("needs an NPU")


class ThirdFeature(Base):
    function = third_forward

    def validate_args(self, args: Any) -> None:
        if getattr(args, "third", False):
            raise ImportError("--third requires third-party to be installed.")


class ForcedFeature(Base):
    function = third_forward
    force = True


class ClassFeature(Base):
    target = "pk_plan.model.Attention"
    function = NewAttention


class TimingFeature(Base):
    function = timing_wrapper


class MissingFeature(Base):
    def register_patches(self, patch_manager: Any, args: Any) -> None:
        from argparse import NoSuchThing  # type: ignore[attr-defined]  # noqa: F401


class WaitingFeature(Base):
    def register_patches(self, patch_manager: Any, args: Any) -> None:
        time.sleep(600)


class AbsentFeature(Base):
    target = "pk_absent.model.run"

    def register_patches(self, patch_manager: Any, args: Any) -> None:
        patch_manager.register_patch(self.target, first_forward)


FEATURES = (
    ClassFeature("use_class"),
    FirstFeature("first"),
    SecondFeature("second"),
    ThirdFeature("third"),
    ForcedFeature("forced"),
    TimingFeature("timing"),
    MissingFeature("missing"),
    WaitingFeature("waiting"),
    AbsentFeature("absent"),
)


def register(guard: patchguard.Guard) -> None:
    """Give a guard all features; each is on when its argument is."""
    for feature in FEATURES:
        guard.add_feature(feature)


def broken(guard: patchguard.Guard) -> None:
    """Fails before there is anything to plan."""
    raise KeyError("no such feature list")
