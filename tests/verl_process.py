"""One process holding verl's MindSpeed engine and real MindSpeed, on a machine with neither an NPU nor CANN.

In a process of its own, since MindSpeed cannot be un-imported:

>>> import verl_process
>>> verl_process.set_up("0.9.1")    # paths, stand-ins, patchguard.cannless; torch is not imported yet
>>> # ... patchguard.install() here, to guard MindSpeed's very first pass too ...
>>> engine = verl_process.load()    # verl.workers.engine.mindspeed.transformer_impl
>>> engine._mindspeed_repatch(verl_process.engine_config({"use_flash_attn": True}))

`prepare` is `set_up` and `load` in one. ``python verl_process.py VERSION CONFIG ...`` runs each CONFIG (a
JSON object, the ``override_transformer_config``) through verl's ``_mindspeed_repatch`` in turn, unguarded,
and prints one JSON report.

Where things come from
    verl: the environment, or the folder ``$PATCHGUARD_VERL/<version>`` (by default
    ``~/.cache/patchguard/verl-<version>``), filled by
    ``pip install --no-deps --target <folder> verl==<version>``.
    MindSpeed and Megatron: the host checkout ``$PATCHGUARD_HOSTS/<host>`` (by default
    ``~/.cache/patchguard/hosts/<host>``).
    The rest (torch, torch_npu, transformers 5.5.3 to 5.10, tensordict, ray, hydra, ...): the environment.

`StandIns` answers for torchvision, and for ``acl`` and ``batch_invariant_ops``, which come with CANN. Nothing
of torchvision is called here, but without it MindSpeed's unguarded ``hasattr`` on every module makes the lazy
modules of transformers raise, and MindSpeed does not import. A stand-in is the last resort: what is installed
wins.

Unguarded, each pass also makes transformers log tens of thousands of warnings; ``TRANSFORMERS_VERBOSITY=error``
in the environment silences them.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import importlib.metadata
import importlib.util
import json
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

HOST = "mindspeed-core_r0.16.0"
"""The host checkout that both verl releases named here run on."""

ENGINE = "verl.workers.engine.mindspeed.transformer_impl"
"""The module that holds verl's ``_mindspeed_repatch``."""

CONFLICT: Mapping[str, Any] = {
    "attention_backend": "flash",
    "use_flash_attn": True,
    "use_flash_attn_npu_batch_invariant": True,
    "batch_invariant_mode": True,
}
"""The ``override_transformer_config`` on which two features replace ``DotProductAttention.forward``."""

ATTENTION_TARGETS = (
    "megatron.core.transformer.dot_product_attention.DotProductAttention.forward",
    "megatron.core.extensions.transformer_engine.TEDotProductAttention.forward",
)
"""The two targets that `CONFLICT` is about."""

# What verl's engine imports beyond torch; find_spec of each is a cheap, torch-free look.
_NEEDED = (
    "torch",
    "torch_npu",
    "triton",
    "transformers",
    "tensordict",
    "ray",
    "hydra",
    "omegaconf",
    "codetiming",
    "torchdata",
    "peft",
    "accelerate",
    "PIL",
    "cachetools",
    "elftools",
)


def verl_folder(version: str) -> Path:
    """The folder that holds verl ``version`` where the environment does not; it need not exist."""
    root = os.environ.get("PATCHGUARD_VERL")
    folder = Path(root) / version if root else Path(f"~/.cache/patchguard/verl-{version}")
    return folder.expanduser()


def host_folder(host: str = HOST) -> Path:
    """The folder of a host checkout, with ``mindspeed`` and ``megatron`` at its top; it need not exist."""
    return Path(os.environ.get("PATCHGUARD_HOSTS") or "~/.cache/patchguard/hosts").expanduser() / host


def _installed_verl() -> str | None:
    if importlib.util.find_spec("verl") is None:
        return None
    try:
        return importlib.metadata.version("verl")
    except importlib.metadata.PackageNotFoundError:  # a folder on sys.path
        return None


def missing(version: str | None = None, host: str = HOST) -> str | None:
    """Why `set_up` cannot work here, for a test's skip reason; None when it can. Imports nothing."""
    if not (host_folder(host) / "mindspeed").is_dir():
        return f"no host checkout {host_folder(host)}"
    if version is None:
        if importlib.util.find_spec("verl") is None:
            return "verl is not installed"
    elif _installed_verl() != version and not (verl_folder(version) / "verl").is_dir():
        return f"verl {version} is neither installed nor in {verl_folder(version)}"
    absent = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    return f"verl's engine needs {', '.join(absent)}" if absent else None


# ---- stand-ins ---------------------------------------------------------------------------------------------


class _DummyType(type):
    """A class whose every attribute is a dummy again, as in ``InterpolationMode.BILINEAR``."""

    def __getattr__(cls, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return _dummy(f"{cls.__qualname__}.{name}")


@functools.cache
def _dummy(path: str) -> type:
    """One class a dotted path: two looks give one object, and two names never the same."""
    return _DummyType(path.rpartition(".")[2], (), {"__module__": __name__, "__qualname__": path})


class StandIns(MetaPathFinder, Loader):
    """Serves empty packages for modules that are not installed.

    Names in ``empty`` have no attributes at all. In ``dummies`` every attribute is there, as an empty class
    that may be subclassed, annotated with and used as a key; it does not become an entry of the module's
    dictionary.
    """

    def __init__(self, dummies: Sequence[str] = (), empty: Sequence[str] = ()) -> None:
        self.dummies = frozenset(dummies)
        self.empty = frozenset(empty)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """A spec for the named packages and for all below the ``dummies``; None for everything else."""
        if fullname.partition(".")[0] in self.dummies or fullname in self.empty:
            return ModuleSpec(fullname, self, origin="stand-in", is_package=True)
        return None

    def create_module(self, spec: ModuleSpec) -> None:
        """The import system's ordinary module."""

    def exec_module(self, module: ModuleType) -> None:
        """Give a module of the ``dummies`` its ``__getattr__``."""
        if module.__name__.partition(".")[0] not in self.dummies:
            return

        def getattr_(name: str) -> type:
            if name.startswith("__"):
                raise AttributeError(name)
            return _dummy(f"{module.__name__}.{name}")

        module.__dict__.update(__getattr__=getattr_, __version__="0.0.0")


# ---- the process -------------------------------------------------------------------------------------------


@contextmanager
def _bare_command_line() -> Iterator[None]:
    """MindSpeed reads its first arguments from the command line, pytest's or ours included, so hide it."""
    argv = sys.argv
    sys.argv = argv[:1] or [""]
    try:
        yield
    finally:
        sys.argv = argv


def set_up(version: str | None = None, host: str = HOST) -> None:
    """Make the imports work that `load` does; imports neither torch nor MindSpeed.

    ``version`` is the verl release wanted; None takes the environment's. Raises `RuntimeError` when something
    is not there (the message is `missing`'s) or torch is already imported, `patchguard.errors.HostError` when
    the CANN stand-ins cannot be built.
    """
    reason = missing(version, host)
    if reason is not None:
        raise RuntimeError(f"cannot set up a verl process: {reason}")
    if "torch" in sys.modules:
        raise RuntimeError("torch is already imported: set_up needs a fresh process and comes before torch")
    from patchguard import cannless

    # The checkout comes first: its megatron shadows the installed one.
    sys.path.insert(0, str(host_folder(host)))
    if version is not None and _installed_verl() != version:
        sys.path.insert(1, str(verl_folder(version)))
    sys.meta_path.append(StandIns(dummies=("torchvision",), empty=("acl", "batch_invariant_ops")))
    cannless.enable()


def load(mindspeed_first: bool = True) -> Any:
    """Import MindSpeed, then verl's engine module, which is returned (``_mindspeed_repatch`` is in it).

    With ``mindspeed_first=False`` verl's own import order holds: much of verl before MindSpeed. Raises
    `RuntimeError` when verl did not find MindSpeed's ``repatch``, which it would ignore silently.
    """
    with _bare_command_line():
        if mindspeed_first:
            importlib.import_module("mindspeed.megatron_adaptor")
        engine = importlib.import_module(ENGINE)
    if engine.repatch is None:
        raise RuntimeError("verl could not import MindSpeed's repatch; import mindspeed.megatron_adaptor to see why")
    return engine


def prepare(version: str | None = None, host: str = HOST) -> Any:
    """`set_up`, then `load`: a process ready for ``_mindspeed_repatch``. Raises what they raise."""
    set_up(version, host)
    return load()


# ---- verl's configs, the shapes in which its engine meets them ---------------------------------------------


def engine_config(overrides: Mapping[str, Any] | None = None, **fields: Any) -> Any:
    """verl's dataclass ``McoreEngineConfig``, its ``override_transformer_config`` exactly ``overrides``.

    ``fields`` are further fields of the dataclass (``context_parallel_size=2``).
    """
    config_type = importlib.import_module("verl.workers.config").McoreEngineConfig
    return config_type(override_transformer_config=dict(overrides or {}), **fields)


def dict_config(overrides: Mapping[str, Any] | None = None, **fields: Any) -> Any:
    """verl's shipped ``engine/megatron.yaml`` as a ``DictConfig``, overridden as on a verl command line.

    ``overrides`` are merged into the shipped ``override_transformer_config`` (recompute settings and
    ``attention_backend: flash``); ``fields`` are merged at the top.
    """
    from omegaconf import OmegaConf

    package = Path(str(importlib.import_module("verl").__file__)).parent
    shipped = OmegaConf.load(package / "trainer/config/engine/megatron.yaml")
    return OmegaConf.merge(shipped, {**fields, "override_transformer_config": dict(overrides or {})})


def trainer_config(overrides: Mapping[str, Any] | None = None, **fields: Any) -> Any:
    """`dict_config` made a ``McoreEngineConfig`` by verl's own conversion: what a trainer passes on."""
    convert = importlib.import_module("verl.utils.config").omega_conf_to_dataclass
    return convert(dict_config(overrides, **fields))


FORMS = {"dataclass": engine_config, "dictconfig": dict_config, "trainer": trainer_config}
"""The three config builders by name."""


# ---- looking -----------------------------------------------------------------------------------------------


def bound(target: str) -> str:
    """Where the function now bound at ``target`` (module, class, attribute) was defined: ``module:qualname``.

    Reads `sys.modules` and class dictionaries only; ``unset`` when there is no such thing.
    """
    path, _, name = target.rpartition(".")
    module, _, owner = path.rpartition(".")
    cls = vars(sys.modules[module]).get(owner) if module in sys.modules else None
    value = vars(cls).get(name) if isinstance(cls, type) else None
    return f"{value.__module__}:{value.__qualname__}" if value is not None else "unset"


def run(engine: Any, config: Any) -> dict[str, Any]:
    """One ``_mindspeed_repatch(config)``: its error if any, the patches then applied, who has attention."""
    manager = sys.modules["mindspeed.patch_utils"].MindSpeedPatchesManager
    started = time.process_time()
    error = None
    try:
        engine._mindspeed_repatch(config)
    except Exception as caught:
        error = f"{type(caught).__name__}: {caught}"
    seconds = time.process_time() - started
    patches = manager.patches_info.values()
    return {
        "error": error,
        "targets": len(patches),
        "applied": sum(1 for patch in patches if patch.is_applied),
        "attention": {target: bound(target) for target in ATTENTION_TARGETS},
        "modules": len(sys.modules),
        "cpu_seconds": round(seconds, 3),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Run configs through verl, unguarded, and print the report as one line of JSON; always 0."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("version", help="verl release, or 'installed'")
    parser.add_argument("config", nargs="+", help="JSON object, or 'conflict' for verl_process.CONFLICT")
    parser.add_argument("--form", choices=sorted(FORMS), default="dataclass", help="shape of the engine config")
    parser.add_argument("--verl-first", action="store_true", help="verl's own import order")
    options = parser.parse_args(argv)
    overrides = [dict(CONFLICT) if text == "conflict" else json.loads(text) for text in options.config]

    root = str(Path(__file__).resolve().parent.parent)
    if importlib.util.find_spec("patchguard") is None:
        sys.path.append(root)
    started = time.process_time()
    set_up(None if options.version == "installed" else options.version)
    engine = load(mindspeed_first=not options.verl_first)
    report: dict[str, Any] = {
        "verl": sys.modules["verl"].__version__,
        "import": {"modules": len(sys.modules), "cpu_seconds": round(time.process_time() - started, 3)},
        "start": {target: bound(target) for target in ATTENTION_TARGETS},
        "repatches": [run(engine, FORMS[options.form](each)) for each in overrides],
    }
    print(json.dumps(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
