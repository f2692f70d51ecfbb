"""The embedded host: features and arguments of the process itself, where no MindSpeed is present.

It has MindSpeed's shape (features that are asked whether the arguments want them, and register in two
phases), so code written for one runs on the other. Tests, demos and plain Megatron scripts use it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from patchguard.arguments import ArgumentTypes, feature_switches
from patchguard.registry import Registry

if TYPE_CHECKING:
    import argparse  # imported where it is used, since `import patchguard` is to be quick

    from patchguard.guard import Guard

__all__ = ["EmbeddedHost", "Feature"]


class Feature:
    """Base class of features for the embedded host; the methods of MindSpeed's ``MindSpeedFeature``.

    Args:
        feature_name: the boolean argument that switches the feature on; ``-`` becomes ``_``.
        optimization_level: 0 makes it a default feature, which always registers.
    """

    def __init__(self, feature_name: str, optimization_level: int = 2) -> None:
        self.feature_name = feature_name.lower().strip().replace("-", "_")
        self.optimization_level = optimization_level
        self.default_patches = optimization_level == 0

    def is_need_apply(self, args: argparse.Namespace) -> bool:
        """Whether the arguments ask for this feature."""
        return self.default_patches or bool(getattr(args, self.feature_name, None))

    def register_args(self, parser: argparse.ArgumentParser) -> None:
        """Declare the feature's arguments; without a declaration its name is a switch."""

    def pre_register_patches(self, patch_manager: Registry, args: argparse.Namespace) -> None:
        """Register what must be in force before the other features register."""

    def register_patches(self, patch_manager: Registry, args: argparse.Namespace) -> None:
        """Register the feature's patches."""


class _FunctionFeature(Feature):
    def __init__(self, register: Callable[[Registry, argparse.Namespace], Any]) -> None:
        super().__init__(getattr(register, "__name__", type(register).__name__), optimization_level=0)
        self._register = register

    def register_patches(self, patch_manager: Registry, args: argparse.Namespace) -> None:
        self._register(patch_manager, args)


class EmbeddedHost:
    """A host without MindSpeed. ``features`` register in order; ``base`` holds the starting arguments."""

    name = "patchguard"
    packages: frozenset[str] = frozenset()

    def __init__(self, guard: Guard) -> None:
        self._guard = guard
        self.registry = Registry(guard, self.name)
        self.features: list[Feature] = []
        self.base: dict[str, Any] = {}
        self._declared = ArgumentTypes()

    @property
    def manager(self) -> Registry:
        """What features register with."""
        return self.registry

    def add_feature(self, feature: Feature | Callable[[Registry, argparse.Namespace], Any]) -> Feature:
        """Append a feature; a plain function ``(registry, args)`` is one that always registers."""
        added = feature if isinstance(feature, Feature) else _FunctionFeature(feature)
        self.features.append(added)
        return added

    def declare(self, **types: Any) -> None:
        """Give arguments a type: ``declare(depth=int, backend=AttnBackend)``."""
        self._declared = self._declared.merged(ArgumentTypes.declared(**types))

    def types(self) -> ArgumentTypes:
        """What type each argument asks for: feature names are switches, declarations come on top."""
        switches = feature_switches(f.feature_name for f in self.features)
        return switches.merged(ArgumentTypes.from_parser(self._parser())).merged(self._declared)

    def live_arguments(self) -> argparse.Namespace | None:
        """None: each repatch starts from a fresh namespace."""
        return None

    def starting_arguments(self) -> dict[str, Any]:
        """The arguments before any config: declared defaults, then ``base``."""
        return {**vars(self._parser().parse_known_args([])[0]), **self.base}

    def run(self, arguments: Mapping[str, Any]) -> None:
        """What MindSpeed's ``repatch`` does: forget, set arguments, let features register and apply, twice."""
        import argparse

        args = argparse.Namespace(**{**self.starting_arguments(), **arguments})
        self._guard.remove_features(self)
        self._guard.run_phase(self, "pre", args)
        self._guard.run_phase(self, "main", args)

    def versions(self) -> dict[str, str]:
        """Nothing: Megatron's version is found by the guard."""
        return {}

    def _parser(self) -> argparse.ArgumentParser:
        import argparse

        parser = argparse.ArgumentParser(add_help=False)
        for feature in self.features:
            feature.register_args(parser)
        return parser
