"""The real torch_npu on a machine without CANN.

torch_npu's shared objects are linked against CANN's libraries (``libascendcl.so`` and others). Without them
``import torch_npu`` fails, and so does ``import torch``, since torch loads an installed torch_npu by itself.
`enable` reads from the wheel which libraries and symbols are missing, compiles stand-ins for them once per
version, and loads those into the process. torch_npu then imports, reports no device, and has its operator
schemas; nothing computes on an NPU.

>>> import patchguard.cannless
>>> patchguard.cannless.enable()        # before torch is imported
>>> import torch, torch_npu
>>> torch.npu.is_available()
False

Nothing is written to the wheel or to the environment, so each process that imports torch calls `enable`; a
forked child has the stand-ins already. A real CANN is never shadowed.

Stand-ins return an error code, null or a text. A C++ function that returns an object by value leaves it
unset; torch_npu comes to those only with a device.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from patchguard.errors import HostError

__all__ = ["State", "Status", "enable", "status"]

State = Literal["enabled", "off", "cann", "no-torch_npu"]
"""``enabled``: the stand-ins are loaded. ``off``: torch_npu is installed, CANN is not, and `enable` was not
called yet. ``cann``: a CANN is there and is left alone. ``no-torch_npu``: torch_npu is not installed."""

NO_DEVICE = 207004
"""``ACL_ERROR_RT_NO_DEVICE`` of CANN's ``acl/error_codes/rt_error_codes.h``: what the stand-ins return."""

_PROBE = "libascendcl.so"
_MARK = "patchguard_cann_stand_in"  # a symbol that only the stand-ins have
_MANIFEST = "manifest.json"
_DETAIL = "stand-ins for CANN are loaded: torch_npu sees no device"

# What each kind of stand-in function returns. The default is an error code; these cannot report one.
# `const char *` getters, of ACL's C interface and of GE's C++ one.
_TEXT = frozenset(
    {
        "aclGetRecentErrMsg",
        "aclrtGetSocName",
        "_ZNK2ge12AscendString9GetStringEv",
        "_ZN2ge13GetFormatNameENS_6FormatE",
    }
)
# Those that return a pointer, a size or a bool: null, zero, false.
_ZERO = re.compile(
    r"acl(?!rt)[a-z]*Create[A-Z]\w*"
    r"|acltdtGet(DataItem|DatasetSize|(DataAddr|DataSize|DimNum|SliceNum|SliceId)FromItem)"
    r"|aclGet(TensorDesc(NumDims|Size|ElementCount|Address)|DataBuffer\w+|CompileoptSize)"
    r"|Msprof(SysCycleTime|GetHashId|Str2Id)"
    r"|_ZNK?2ge6Tensor7GetDataEv|_ZNK2ge6Tensor\w*(ShapeDimNum|ShapeDim)E\w"
    r"|_ZNK2ge12AscendString(eq|lt)\w+|_ZN2ge15OperatorFactory9IsExistOpEPKc"
    r"|_ZNK2ge20CompiledGraphSummary8IsStaticEv|_ZN3atb5Utils13GetTensorSize\w+"
)
# Enums whose "undefined" is -1, and checked printf, where a positive number means characters written.
_MINUS_ONE = re.compile(r"aclGetTensorDesc(Type|Format)|acltdtGetDataTypeFromItem|v?s(n|w)?printf_s")


@dataclass(frozen=True)
class Status:
    """Where this process stands.

    ``state`` is one of `State`; ``torch_npu`` the installed version or None; ``libraries`` the sonames of the
    stand-ins, empty when there are none; ``cache`` the folder for them, or None; ``detail`` says why.
    """

    state: State
    torch_npu: str | None = None
    libraries: tuple[str, ...] = ()
    cache: str | None = None
    detail: str = ""

    def as_dict(self) -> dict[str, Any]:
        """The fields as plain JSON types."""
        return {**asdict(self), "libraries": list(self.libraries)}


_lock = threading.Lock()
_enabled: Status | None = None
_handles: list[ctypes.CDLL] = []  # keeps the libraries loaded


def enable(cache_dir: str | os.PathLike[str] | None = None) -> Status:
    """Make the installed torch_npu importable without CANN; comes before the first ``import torch``.

    Does nothing where a CANN is installed, where torch_npu is not, and on a second call. (Where torch was
    imported with ``TORCH_DEVICE_BACKEND_AUTOLOAD=0``, before the first ``import torch_npu`` is early enough.)
    ``cache_dir`` is for the compiled stand-ins; by default ``$PATCHGUARD_CACHE``, else ``patchguard`` in
    ``$XDG_CACHE_HOME`` or ``~/.cache``.

    Raises `HostError` when an ``import torch`` has already failed in this process; when stand-ins have to be
    built and pyelftools or a C compiler is missing; and when they cannot be compiled, written or loaded.
    """
    global _enabled
    with _lock:
        now, wheel = _look(cache_dir)
        if now.state != "off":
            return now
        assert wheel is not None and now.cache is not None
        _refuse_after_failed_import()
        folder = Path(now.cache)
        libraries = now.libraries or _fill_cache(folder, wheel)
        _load(folder, libraries)
        _enabled = Status("enabled", now.torch_npu, libraries, now.cache, _DETAIL)
        return _enabled


def status(cache_dir: str | os.PathLike[str] | None = None) -> Status:
    """What `enable` did in this process, or what it would find; builds and writes nothing."""
    with _lock:
        return _look(cache_dir)[0]


def _look(cache_dir: str | os.PathLike[str] | None) -> tuple[Status, _Wheel | None]:
    if _enabled is not None:
        return _enabled, None
    wheel = _Wheel.installed()
    if wheel is None:
        return Status("no-torch_npu", detail="torch_npu is not installed"), None
    loaded, cann = _find_cann()
    if cann:
        return Status("enabled" if loaded else "cann", wheel.version, detail=cann), wheel
    folder = _cache_root(cache_dir) / "cannless" / wheel.key()
    built = _cached(folder) or ()
    detail = f"there is no CANN; stand-ins are {'built' if built else 'not built'} and not loaded"
    return Status("off", wheel.version, built, str(folder), detail), wheel


# ---- what is installed ---------------------------------------------------------------------------


@dataclass(frozen=True)
class _Wheel:
    """The installed torch_npu, and the torch beside it, found without importing either."""

    version: str
    folder: Path
    torch_version: str
    torch_folder: Path | None

    @classmethod
    def installed(cls) -> _Wheel | None:
        folder = _package_folder("torch_npu")
        if folder is None:
            return None
        return cls(_version("torch_npu"), folder, _version("torch"), _package_folder("torch"))

    def objects(self) -> list[Path]:
        """torch_npu's own shared objects."""
        return sorted(self.folder.rglob("*.so"))

    def neighbours(self) -> list[Path]:
        """The shared objects that torch_npu finds beside itself: torch's, and what either wheel bundles."""
        folders = [self.folder.parent / "torch_npu.libs"]
        if self.torch_folder is not None:
            folders += [self.torch_folder / "lib", self.torch_folder.parent / "torch.libs"]
        return sorted(path for folder in folders if folder.is_dir() for path in folder.glob("*.so*"))

    def key(self) -> str:
        """Names a cache folder: version, platform, and a digest of what else matters, this file too."""
        sizes = [(str(path.relative_to(self.folder)), path.stat().st_size) for path in self.objects()]
        content = (_digest(Path(__file__)), self.torch_version, sizes)
        digest = hashlib.sha256(repr(content).encode()).hexdigest()[:12]
        return f"torch_npu-{self.version}-{sys.platform}-{platform.machine()}-{digest}"


def _package_folder(name: str) -> Path | None:
    try:
        spec = importlib.util.find_spec(name)
    except (ValueError, ImportError):  # a module made by hand, without a spec
        return None
    if spec is None or spec.origin is None:
        return None
    return Path(spec.origin).parent


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def _find_cann() -> tuple[bool, str]:
    """Whether stand-ins are loaded, and one sentence about what is there, empty when there is nothing.

    The loader's own answer comes first, then the folders: a CANN whose environment or driver is not set up
    needs that, not stand-ins.
    """
    try:
        library = ctypes.CDLL(_PROBE)
    except OSError as error:
        found = next((path for path in _cann_candidates() if path.exists()), None)
        if found is None:
            return False, ""
        return False, f"{found} exists but does not load ({error}); set up CANN's environment and its driver"
    if hasattr(library, _MARK):  # another copy of this module, or an LD_LIBRARY_PATH into the cache
        return True, _DETAIL
    return False, f"{_PROBE} loads"


def _cann_candidates() -> Iterator[Path]:
    for entry in os.environ.get("LD_LIBRARY_PATH", "").split(":"):
        if entry:
            yield Path(entry) / _PROBE
    # The last one is where CANN's installer puts it.
    variables = ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME")
    for root in (*map(os.environ.get, variables), "/usr/local/Ascend/ascend-toolkit/latest"):
        if root:
            for folder in ("lib64", "runtime/lib64", f"{platform.machine()}-linux/lib64"):
                yield Path(root) / folder / _PROBE


def _refuse_after_failed_import() -> None:
    # torch registers its operators once per process, so a second attempt fails whatever has been loaded.
    if "torch" not in sys.modules and any(name.startswith("torch.") for name in list(sys.modules)):
        raise HostError(
            "an `import torch` has failed in this process and cannot succeed any more; start a new process,"
            " and call patchguard.cannless.enable() there before the first `import torch`"
        )


# ---- what is missing -----------------------------------------------------------------------------


@dataclass(frozen=True)
class _Object:
    """The dynamic section of one shared object."""

    soname: str
    needed: tuple[str, ...]
    undefined: frozenset[str]  # strong and bound to no versioned library
    defined: frozenset[str]


@dataclass(frozen=True)
class _Missing:
    """The libraries (sonames) and symbols that nothing on this machine provides."""

    libraries: tuple[str, ...]
    symbols: tuple[str, ...]


_SYMBOL = struct.Struct("<IBBHQQ")  # Elf64_Sym: name, info, other, section, value, size
_WEAK = 2


def _read_object(path: Path) -> _Object:
    try:
        from elftools.common.exceptions import ELFError
        from elftools.elf.elffile import ELFFile
    except ImportError as error:
        raise HostError(
            "building stand-ins for CANN reads torch_npu's shared objects with pyelftools, which is not"
            " installed; run `pip install pyelftools`"
        ) from error
    with path.open("rb") as stream:
        try:
            elf = ELFFile(stream)
            if elf.elfclass != 64 or not elf.little_endian:
                raise HostError(f"{path} is not a 64-bit little-endian ELF file, as all of torch_npu's are")
            tags = list(elf.get_section_by_name(".dynamic").iter_tags())
            symbols = elf.get_section_by_name(".dynsym")
            table, names = symbols.data(), symbols.stringtable.data()
            versions = elf.get_section_by_name(".gnu.version")
            bound = memoryview(versions.data()).cast("H") if versions is not None else None
        except (ELFError, AttributeError) as error:
            raise HostError(f"{path} is not a shared object that can be read: {error}") from error
    undefined, defined = set(), set()
    # Decoded in bulk: pyelftools' object for each symbol takes 30 times as long (6 s for libtorch_cpu.so).
    for index, (name, info, _, section, _, _) in enumerate(_SYMBOL.iter_unpack(table)):
        text = names[name : names.index(b"\0", name)].decode()
        if section:
            defined.add(text)
        elif text and info >> 4 != _WEAK and (bound is None or bound[index] & 0x7FFF < 2):
            undefined.add(text)
    soname = next((tag.soname for tag in tags if tag.entry.d_tag == "DT_SONAME"), path.name)
    needed = tuple(tag.needed for tag in tags if tag.entry.d_tag == "DT_NEEDED")
    return _Object(soname, needed, frozenset(undefined), frozenset(defined))


def _missing(objects: Iterable[Path], neighbours: Iterable[Path]) -> _Missing:
    """What ``objects`` need that neither they, nor ``neighbours``, nor the system's libraries provide."""
    own = [_read_object(path) for path in objects]
    # All of torch's, not only those named: libtorch_npu.so takes a symbol from libshm.so through another one,
    # and a stand-in that is loaded first would take its place.
    there = own + [_read_object(path) for path in neighbours]
    needed = {name for item in own for name in item.needed} - {item.soname for item in there}
    # The C and C++ run time carry a version in their names (libc.so.6); CANN's libraries do not.
    absent = {name for name in needed if name.endswith(".so")}
    defined = {name for item in there for name in item.defined}
    symbols = {name for item in own for name in item.undefined} - defined
    system = []
    for name in sorted(needed - absent):
        with contextlib.suppress(OSError):
            system.append(ctypes.CDLL(name))
    left = (
        name for name in symbols if not re.match("_?Py", name) and not any(hasattr(library, name) for library in system)
    )
    return _Missing(tuple(sorted(absent)), tuple(sorted(left)))


# ---- the stand-ins -------------------------------------------------------------------------------


def _generate(symbols: Iterable[str], version: str) -> str:
    """C that defines all ``symbols``. They are assembler labels there, so C++ names and builtins work too."""
    text = json.dumps(f"no CANN: stand-in for torch_npu {version}")
    lines = [f"int {_MARK} = 1;", f"static const char text[] = {text};"]
    for index, name in enumerate(symbols):
        if not re.fullmatch(r"[\w.$@]+", name, re.ASCII):
            raise HostError(f"torch_npu {version} needs a symbol {name!r}, which no assembler label can hold")
        label = f'__asm__("{name}")'
        if re.match("_ZT[VTIS]", name):  # C++ class data, read and never called
            lines += [f"extern const char d{index}[256] {label};", f"const char d{index}[256] = {{0}};"]
        elif name == "aclrtGetDeviceCount":
            lines += [
                f"int f{index}(unsigned *count) {label};",
                f"int f{index}(unsigned *count) {{ if (count) *count = 0; return 0; }}",
            ]
        elif name in _TEXT:
            lines += [
                f"const char *f{index}(void) {label};",
                f"const char *f{index}(void) {{ return text; }}",
            ]
        else:
            value = 0 if _ZERO.fullmatch(name) else -1 if _MINUS_ONE.fullmatch(name) else NO_DEVICE
            lines += [f"long f{index}(void) {label};", f"long f{index}(void) {{ return {value}; }}"]
    return "\n".join(lines) + "\n"


def _compile(source: str, libraries: Iterable[str], folder: Path) -> None:
    """One library with all symbols, under the first name; the others are empty and depend on it."""
    compiler = next((found for found in map(shutil.which, ("cc", "gcc", "clang")) if found), None)
    if compiler is None:
        raise HostError("building stand-ins for CANN takes a C compiler; found no cc, gcc or clang on PATH")
    (folder / "stand_in.c").write_text(source)
    (folder / "empty.c").write_text("typedef int empty;\n")
    first, *others = libraries
    jobs = [(first, ["stand_in.c"])]
    jobs += [(name, ["empty.c", "-Wl,--no-as-needed", f"./{first}"]) for name in others]
    for name, inputs in jobs:
        command = [compiler, "-shared", "-fPIC", "-O0", "-w", f"-Wl,-soname,{name}", "-o", name, *inputs]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        if done.returncode:
            error = done.stderr.strip()
            raise HostError(f"the stand-in for {name} does not compile: {' '.join(command)}: {error}")


def _load(folder: Path, libraries: Iterable[str]) -> None:
    for name in libraries:
        try:
            _handles.append(ctypes.CDLL(str(folder / name), mode=ctypes.RTLD_GLOBAL))
        except OSError as error:
            raise HostError(f"a stand-in does not load: {error}; delete {folder} and try again") from error


# ---- the cache -----------------------------------------------------------------------------------


def _cache_root(cache_dir: str | os.PathLike[str] | None) -> Path:
    if cache_dir is not None:
        return Path(cache_dir).expanduser().absolute()
    if os.environ.get("PATCHGUARD_CACHE"):
        return Path(os.environ["PATCHGUARD_CACHE"]).expanduser().absolute()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser().absolute() / "patchguard"


def _cached(folder: Path) -> tuple[str, ...] | None:
    """The libraries in ``folder``, or None when it does not hold exactly what was built."""
    try:
        manifest: Mapping[str, str] = json.loads((folder / _MANIFEST).read_text())["sha256"]
        whole = all(_digest(folder / name) == digest for name, digest in manifest.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return tuple(manifest) if whole and manifest else None


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _fill_cache(folder: Path, wheel: _Wheel) -> tuple[str, ...]:
    """Build what goes into ``folder``: beside it, then one rename, so that nobody ever sees a part of it."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _exclusive(folder.parent / ".lock"):
            # Somebody else may have built it while this process waited.
            return _cached(folder) or _build(folder, wheel)
    except OSError as error:
        raise HostError(
            f"stand-ins for CANN could not be built in {folder}: {error}; if the folder is the trouble,"
            " name a writable one in $PATCHGUARD_CACHE"
        ) from error


def _build(folder: Path, wheel: _Wheel) -> tuple[str, ...]:
    missing = _missing(wheel.objects(), wheel.neighbours())
    if not missing.libraries:  # not linked against CANN: nothing to stand in for
        return ()
    # The probed library first: it is the one that holds the symbols.
    libraries = sorted(missing.libraries, key=lambda name: (name != _PROBE, name))
    with tempfile.TemporaryDirectory(prefix=".build-", dir=folder.parent) as scratch:
        build = Path(scratch) / "new"
        build.mkdir()
        _compile(_generate(missing.symbols, wheel.version), libraries, build)
        manifest = {"symbols": len(missing.symbols), "sha256": {n: _digest(build / n) for n in libraries}}
        (build / _MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")
        try:
            build.rename(folder)
        except OSError:  # something is there: another builder's, where nothing can be locked, or a broken one
            if _cached(folder) is None:
                folder.rename(Path(scratch) / "old")
                build.rename(folder)
    return tuple(libraries)


@contextlib.contextmanager
def _exclusive(path: Path) -> Iterator[None]:
    """One builder at a time. This saves work only: where nothing can be locked, the rename keeps it right."""
    with path.open("w") as stream:
        with contextlib.suppress(OSError):
            fcntl.flock(stream, fcntl.LOCK_EX)
        yield
