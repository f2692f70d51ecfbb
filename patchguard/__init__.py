"""patchguard: the runtime guard for MindSpeed's monkey patches on Ascend NPUs.

>>> import patchguard
>>> guard = patchguard.install()  # doctest: +SKIP
>>> guard.repatch({"use_flash_attn": True})  # doctest: +SKIP
"""

from patchguard.embedded import Feature
from patchguard.errors import (
    ArgumentsError,
    ConflictError,
    FeatureError,
    FrozenError,
    HostError,
    PatchError,
    PolicyError,
    TargetError,
)
from patchguard.explanation import Explanation
from patchguard.guard import Guard, Outcome
from patchguard.policy import Policy
from patchguard.process import install
from patchguard.registry import Registry
from patchguard.verify import Finding
from patchguard.version import __version__

__all__ = [
    "ArgumentsError",
    "ConflictError",
    "Explanation",
    "Feature",
    "FeatureError",
    "Finding",
    "FrozenError",
    "Guard",
    "HostError",
    "Outcome",
    "PatchError",
    "Policy",
    "PolicyError",
    "Registry",
    "TargetError",
    "__version__",
    "install",
]
