"""Each example runs, and does what it says."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parent.parent / "examples"


def run(name: str) -> list[str]:
    env = {**os.environ, "PATCHGUARD_LOG": "off"}
    done = subprocess.run([sys.executable, str(EXAMPLES / name)], capture_output=True, text=True, check=True, env=env)
    return done.stdout.splitlines()


def test_two_features_one_function() -> None:
    lines = run("two_features_one_function.py")
    results = [line.rpartition("-> ")[2] for line in lines if "-> " in line]
    assert results == [
        "fast(3)",
        "exact(3)",
        "eager(3)",
        "eager(3)",
    ]
    text = "\n".join(lines)
    assert "ExactAttention" in text and "exact-over-fast: who asks for exact results must get them" in text
