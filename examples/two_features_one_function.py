"""Two features want one function; a rule of your own decides. Runs anywhere, without torch or MindSpeed.

python examples/two_features_one_function.py
"""

from __future__ import annotations

import sys
import types

import patchguard

# A library that is to be patched; yours would be megatron.core.
library = types.ModuleType("my_library")
library.attend = lambda tokens: f"eager({tokens})"  # type: ignore[attr-defined]
sys.modules["my_library"] = library

POLICY = """
[[rule]]
name = "exact-over-fast"
winner = "ExactAttention"
over = ["FastAttention"]
targets = ["my_library.attend"]
reason = "who asks for exact results must get them"
"""


class FastAttention(patchguard.Feature):
    """Switched on by the argument ``use_fast``."""

    def register_patches(self, patch_manager: patchguard.Registry, args: object) -> None:
        """Register with the API of MindSpeed's features."""
        patch_manager.register_patch("my_library.attend", fast)


class ExactAttention(patchguard.Feature):
    """Switched on by the argument ``use_exact``."""

    def register_patches(self, patch_manager: patchguard.Registry, args: object) -> None:
        """Register with the API of MindSpeed's features."""
        patch_manager.register_patch("my_library.attend", exact)


def fast(tokens: int) -> str:
    return f"fast({tokens})"


def exact(tokens: int) -> str:
    return f"exact({tokens})"


def main() -> None:
    guard = patchguard.Guard(policy=patchguard.Policy.parse(POLICY, source="this example"))
    guard.add_feature(FastAttention("use-fast"))
    guard.add_feature(ExactAttention("use-exact"))

    for config in ({"use_fast": True}, {"use_fast": "True", "use_exact": "yes"}, {}):
        guard.repatch(config)
        print(config, "->", library.attend(3))

    guard.repatch({"use_fast": True, "use_exact": True})
    print(guard.explain("my_library.attend"))
    guard.uninstall()
    print("uninstalled ->", library.attend(3))


if __name__ == "__main__":
    main()
