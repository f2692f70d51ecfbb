"""Every error that patchguard raises on purpose.

All of them derive from `PatchError`, itself a `RuntimeError`, so code that guarded MindSpeed's own
``RuntimeError`` keeps working. A message names the input, what was expected and what to do, and is raised
before anything has changed or after everything has been put back.
"""

from __future__ import annotations

__all__ = [
    "ArgumentsError",
    "ConflictError",
    "FeatureError",
    "FrozenError",
    "HostError",
    "PatchError",
    "PolicyError",
    "TargetError",
]


class PatchError(RuntimeError):
    """Base of all patchguard errors."""


class ArgumentsError(PatchError):
    """A config, or one of its values, cannot become MindSpeed arguments."""


class PolicyError(PatchError):
    """A policy file or table has a fault; the message names file, line or table, and key."""


class ConflictError(PatchError):
    """Two providers replace one target and the policy in force refuses to choose (``strict`` mode)."""


class TargetError(PatchError):
    """A dotted target names a module, class or attribute that is not there or cannot be patched."""


class FeatureError(PatchError):
    """A feature failed while registering, for example because it imports a name Megatron no longer has."""


class HostError(PatchError):
    """The host (MindSpeed, MindSpeed-LLM) is missing or not of a shape the guard knows."""


class FrozenError(PatchError):
    """A change was asked for after `Guard.freeze`."""
