"""Stand-ins for CANN, on a made-up torch and torch_npu compiled here, and on the real ones where installed.

Loaded libraries and a failed import of torch stay with a process, so whatever enables runs in one of its own.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import stat
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from patchguard import cannless
from patchguard.errors import HostError, PatchError

ROOT = Path(cannless.__file__).parents[1]
COMPILER = shutil.which("cc") or shutil.which("gcc")
NO_DEVICE = 207004
GE_RUN = "_ZN2ge7Session8RunGraphEv"

CAN_BUILD = COMPILER is not None and importlib.util.find_spec("elftools") is not None
WHY_NOT = "stand-ins are built with a C compiler (cc or gcc on PATH) and pyelftools (pip install pyelftools)"
needs_build = pytest.mark.skipif(not CAN_BUILD, reason=WHY_NOT)


def compile_library(path: Path, source: str, *, soname: str | None = None, link: tuple[Path, ...] = ()) -> Path:
    """A shared object from C that needs the libraries in ``link``."""
    assert COMPILER is not None
    path.parent.mkdir(parents=True, exist_ok=True)
    code = path.with_name(path.name + ".c")
    code.write_text(source)
    command = [COMPILER, "-shared", "-fPIC", "-w", "-o", str(path), str(code)]
    command += [f"-Wl,-soname,{soname or path.name}", "-Wl,-z,now", "-Wl,--no-as-needed", *map(str, link)]
    subprocess.run(command, check=True)
    code.unlink()
    return path


def run(code: str, env: dict[str, str], **kwargs: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        env=env,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        **kwargs,
    )


def clean_environment() -> dict[str, str]:
    """This process's, without anything that leads to a CANN."""
    dropped = ("LD_LIBRARY_PATH", "TORCH_DEVICE_BACKEND_AUTOLOAD")
    env = {k: v for k, v in os.environ.items() if k not in dropped and not k.startswith("ASCEND_")}
    return {**env, "PYTHONPATH": str(ROOT)}


@pytest.fixture(scope="module")
def no_cann() -> None:
    """Skips where the machine has a CANN that `clean_environment` does not hide."""
    found = run("from patchguard import cannless; print(cannless._find_cann()[1])", clean_environment())
    if found.stdout.strip():
        pytest.skip(f"this machine has a CANN: {found.stdout.strip()}")


@dataclass
class Host:
    """A made-up site with torch and torch_npu, its cache, and a log of what the C compiler was asked for."""

    site: Path
    cache: Path
    bin: Path
    log: Path

    @property
    def env(self) -> dict[str, str]:
        paths = {"PYTHONPATH": f"{self.site}:{ROOT}", "PATH": f"{self.bin}:{os.environ['PATH']}"}
        return {**clean_environment(), **paths, "PATCHGUARD_CACHE": str(self.cache)}

    def run(self, code: str, **env: str) -> subprocess.CompletedProcess[str]:
        return run(code, {**self.env, **env})

    def ask(self, code: str, **env: str) -> Any:
        """The JSON that ``code`` prints on its last line."""
        done = self.run(code, **env)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    def enable(self, **env: str) -> dict[str, Any]:
        code = "import json, patchguard.cannless as c; print(json.dumps(c.enable().as_dict()))"
        answer: dict[str, Any] = self.ask(code, **env)
        return answer

    def compiled(self) -> int:
        return len(self.log.read_text().splitlines()) if self.log.exists() else 0


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As the real ones are: torch loads torch_npu by itself, which is linked against CANN with BIND_NOW."""
    if not CAN_BUILD:
        pytest.skip(WHY_NOT)
    root = tmp_path_factory.mktemp("site")
    cann = root.parent / "linked_against"
    ascendcl = compile_library(cann / "libascendcl.so", "void unused1(void) {}")
    hccl = compile_library(cann / "libhccl.so", "void unused2(void) {}")
    torch_cpu = compile_library(root / "torch/lib/libtorch_cpu.so", "int at_add(void) { return 1; }")
    (root / "torch/_ops.py").write_text("")
    (root / "torch/__init__.py").write_text("import torch._ops\nimport torch_npu\n")
    names = [
        "aclInit",
        "aclrtGetDevice",
        "HcclSetConfig",
        "aclCreateTensorDesc",
        "printf",
        "at_add",
        "PyList_New",
    ]
    calls = "\n".join(f"int {name}(); int call_{name}(void) {{ return {name}(); }}" for name in names)
    source = f"""
        {calls}
        int aclrtGetDeviceCount(unsigned *);
        int call_count(void) {{ unsigned n = 7; int rc = aclrtGetDeviceCount(&n); return rc ? -1 : (int)n; }}
        const char *aclGetRecentErrMsg(void);
        const char *call_text(void) {{ return aclGetRecentErrMsg(); }}
        int run_graph(void) __asm__("{GE_RUN}");
        int call_run_graph(void) {{ return run_graph(); }}
        extern char type_info[] __asm__("_ZTIN2ge9AllocatorE");
        char *call_type_info(void) {{ return type_info; }}
        extern int optional(void) __attribute__((weak));
        int call_optional(void) {{ return optional ? 1 : 0; }}
    """
    compile_library(root / "torch_npu/lib/libtorch_npu.so", source, link=(ascendcl, hccl, torch_cpu))
    # Takes a symbol of CANN's without naming a library of CANN's, as the real one does.
    profiler = "int aclAppLog(void); int call_log(void) { return aclAppLog(); }"
    compile_library(root / "torch_npu/lib/libnpu_profiler.so", profiler)
    (root / "torch_npu/__init__.py").write_text(
        "import ctypes, pathlib\n"
        "here = pathlib.Path(__file__).parent\n"
        "ctypes.CDLL(str(here.parent / 'torch/lib/libtorch_cpu.so'))\n"
        "profiler = ctypes.CDLL(str(here / 'lib/libnpu_profiler.so'))\n"
        "library = ctypes.CDLL(str(here / 'lib/libtorch_npu.so'))\n"
    )
    for name, version in (("torch_npu", "9.9.0"), ("torch", "9.9.1")):
        info = root / f"{name}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    shutil.rmtree(cann)
    return root


@pytest.fixture
def host(site: Path, tmp_path: Path, no_cann: None) -> Host:
    assert COMPILER is not None
    wrapper = tmp_path / "bin/cc"
    wrapper.parent.mkdir()
    wrapper.write_text(f'#!/bin/sh\necho "$@" >> "{tmp_path}/log"\nexec "{COMPILER}" "$@"\n')
    wrapper.chmod(wrapper.stat().st_mode | stat.S_IXUSR)
    return Host(site, tmp_path / "cache", wrapper.parent, tmp_path / "log")


def folder_of(status: dict[str, Any]) -> Path:
    return Path(status["cache"])


# ---- reading ---------------------------------------------------------------------------------------


@needs_build
def test_reading_tells_undefined_from_defined_weak_and_versioned(tmp_path: Path) -> None:
    needed = compile_library(tmp_path / "libneeded.so", "int provided(void) { return 0; }")
    path = compile_library(
        tmp_path / "file.so",
        "int wanted(void); extern int maybe(void) __attribute__((weak)); int puts(const char *);"
        'int here(void) { puts("text"); return wanted() + (maybe ? 1 : 0); }',
        soname="libnamed.so",
        link=(needed,),
    )
    read = cannless._read_object(path)
    assert read.soname == "libnamed.so"
    assert "libneeded.so" in read.needed
    assert read.undefined == {"wanted"}
    assert "here" in read.defined
    assert not {"wanted", "maybe", "puts"} & read.defined


@needs_build
def test_a_library_without_a_soname_goes_by_its_file_name(tmp_path: Path) -> None:
    source = tmp_path / "plain.c"
    source.write_text("int here(void) { return 0; }")
    assert COMPILER is not None
    subprocess.run([COMPILER, "-shared", "-fPIC", "-o", str(tmp_path / "_C.so"), str(source)], check=True)
    assert cannless._read_object(tmp_path / "_C.so").soname == "_C.so"


@needs_build
def test_a_file_that_is_no_shared_object_is_named(tmp_path: Path) -> None:
    path = tmp_path / "text.so"
    path.write_text("not an ELF file")
    with pytest.raises(HostError, match=r"text\.so"):
        cannless._read_object(path)


@needs_build
def test_missing_leaves_out_what_a_neighbour_or_the_system_has(tmp_path: Path) -> None:
    gone = compile_library(tmp_path / "gone/libascendcl.so", "void unused(void) {}")
    beside = compile_library(tmp_path / "libbeside.so", "int beside(void) { return 0; }")
    # Not named by `own`, but its symbol must not be taken over.
    indirect = compile_library(tmp_path / "libindirect.so", "int indirect(void) { return 0; }")
    own = compile_library(
        tmp_path / "own.so",
        "int beside(void), indirect(void), PyLong_FromLong(void), aclInit(void), sibling(void);"
        "int f(void) { return beside() + indirect() + PyLong_FromLong() + aclInit() + sibling(); }",
        link=(gone, beside),
    )
    sibling = compile_library(tmp_path / "sibling.so", "int sibling(void) { return 0; }")
    missing = cannless._missing([own, sibling], [beside, indirect])
    assert missing == cannless._Missing(("libascendcl.so",), ("aclInit",))


@needs_build
def test_missing_asks_the_system_for_symbols_that_carry_no_version(tmp_path: Path) -> None:
    # A library linked against a stub libc records `dlopen` without a version, as libtorch_npu.so does.
    stub = compile_library(tmp_path / "stub/libc.so.6", "void *dlopen(void) { return 0; }")
    assert COMPILER is not None
    source = tmp_path / "own.c"
    source.write_text("void *dlopen(void); int aclInit(void); int f(void) { dlopen(); return aclInit(); }")
    command = [
        COMPILER,
        "-shared",
        "-fPIC",
        "-w",
        "-nostdlib",
        "-o",
        str(tmp_path / "own.so"),
        str(source),
        str(stub),
    ]
    subprocess.run(command, check=True)
    read = cannless._read_object(tmp_path / "own.so")
    assert read.undefined == {"dlopen", "aclInit"}
    assert cannless._missing([tmp_path / "own.so"], []).symbols == ("aclInit",)


# ---- generating ------------------------------------------------------------------------------------

ANSWERS = {
    "aclInit": NO_DEVICE,
    "aclrtCreateStream": NO_DEVICE,
    "HcclSetConfig": NO_DEVICE,
    "acltdtGetDimsFromItem": NO_DEVICE,
    GE_RUN: NO_DEVICE,
    "_ZN3atb13CreateContextEPPNS_7ContextE": NO_DEVICE,
    # a pointer, a size, a bool
    "aclCreateTensorDesc": 0,
    "aclopCreateAttr": 0,
    "acltdtGetDataItem": 0,
    "acltdtGetDatasetSize": 0,
    "_ZNK2ge6Tensor7GetDataEv": 0,
    "_ZN2ge15OperatorFactory9IsExistOpEPKc": 0,
    # an enum, a number of characters written
    "aclGetTensorDescType": -1,
    "vsnprintf_s": -1,
    # a C builtin, which C of its own would clash with
    "malloc_usable_size": NO_DEVICE,
    "printf": NO_DEVICE,
}
TEXTS = ("aclGetRecentErrMsg", "aclrtGetSocName", "_ZNK2ge12AscendString9GetStringEv")


@needs_build
def test_generated_functions_answer_by_kind(tmp_path: Path) -> None:
    symbols = sorted([*ANSWERS, *TEXTS, "aclrtGetDeviceCount", "_ZTIN2ge9AllocatorE"])
    (tmp_path / "build").mkdir()
    cannless._compile(cannless._generate(symbols, "1.2.3"), ["libx.so", "liby.so"], tmp_path / "build")
    code = f"""
import ctypes, json
library = ctypes.CDLL({str(tmp_path / "build/libx.so")!r}, mode=ctypes.RTLD_GLOBAL)
other = ctypes.CDLL({str(tmp_path / "build/liby.so")!r})
texts = []
for name in {TEXTS!r}:
    getter = library[name]
    getter.restype = ctypes.c_char_p
    texts.append(getter().decode())
count = ctypes.c_uint(7)
print(json.dumps({{
    "answers": {{name: library[name]() for name in {list(ANSWERS)!r}}},
    "texts": texts,
    "count": [library.aclrtGetDeviceCount(ctypes.byref(count)), count.value],
    "no pointer": library.aclrtGetDeviceCount(None),
    "data": ctypes.c_char.in_dll(library, "_ZTIN2ge9AllocatorE").value == bytes(1),
    "through the other": other.aclInit(),
}}))
"""
    done = run(code, clean_environment())
    assert done.returncode == 0, done.stderr
    got = json.loads(done.stdout)
    assert got["answers"] == ANSWERS
    assert all("1.2.3" in text and "no CANN" in text for text in got["texts"])
    assert got["count"] == [0, 0]
    assert got["no pointer"] == 0
    assert got["data"]
    assert got["through the other"] == NO_DEVICE


def test_a_symbol_that_would_break_out_of_its_label_is_refused() -> None:
    with pytest.raises(HostError, match="needs a symbol"):
        cannless._generate(['x"); evil('], "1.2.3")


# ---- the whole way, made up ------------------------------------------------------------------------


def test_torch_and_torch_npu_import_after_enable(host: Host) -> None:
    assert host.run("import torch").returncode != 0, "the made-up host must fail without stand-ins"
    got = host.ask(
        """
import ctypes, json
import patchguard.cannless as c
status = c.enable()
import torch, torch_npu
library = torch_npu.library
library.call_text.restype = ctypes.c_char_p
print(json.dumps({
    "status": status.as_dict(),
    "init": library.call_aclInit(),
    "hccl": library.call_HcclSetConfig(),
    "log": torch_npu.profiler.call_log(),
    "desc": library.call_aclCreateTensorDesc(),
    "count": library.call_count(),
    "text": library.call_text().decode(),
    "c++": library.call_run_graph(),
    "torch's own": library.call_at_add(),
    "weak": library.call_optional(),
}))
"""
    )
    status = got.pop("status")
    assert status["state"] == "enabled"
    assert status["torch_npu"] == "9.9.0"
    assert status["libraries"] == ["libascendcl.so", "libhccl.so"]
    assert folder_of(status).is_relative_to(host.cache)
    assert "no CANN" in got.pop("text")
    assert got == {
        "init": NO_DEVICE,
        "hccl": NO_DEVICE,
        "log": NO_DEVICE,
        "desc": 0,
        "count": 0,
        "c++": NO_DEVICE,
        "torch's own": 1,
        "weak": 0,
    }


def test_only_what_cann_would_provide_is_defined(host: Host) -> None:
    folder = folder_of(host.enable())
    defined = cannless._read_object(folder / "libascendcl.so").defined
    assert {"aclInit", "aclrtGetDeviceCount", GE_RUN, "_ZTIN2ge9AllocatorE"} <= defined
    assert not {"printf", "at_add", "PyList_New", "optional"} & defined


def test_a_second_call_does_nothing(host: Host) -> None:
    same, state = host.ask(
        """
import json, shutil
import patchguard.cannless as c
first = c.enable()
shutil.rmtree(first.cache)
second = c.enable()
print(json.dumps([second is first and c.status() is first, c.status().state]))
"""
    )
    assert same
    assert state == "enabled"
    assert host.compiled() == 2  # one per library, once


def test_a_second_copy_of_the_module_sees_the_first_ones_stand_ins(host: Host) -> None:
    state = host.ask(
        """
import json, sys
import patchguard.cannless as c
c.enable()
del sys.modules["patchguard.cannless"], sys.modules["patchguard"]
import patchguard.cannless as d
assert d is not c
print(json.dumps([d.status().state, d.enable().state]))
"""
    )
    assert state == ["enabled", "enabled"]


def test_status_builds_and_loads_nothing(host: Host) -> None:
    code = (
        "import json, sys, patchguard.cannless as c; s = c.status();"
        "print(json.dumps([s.as_dict(), 'torch' in sys.modules, 'elftools' in sys.modules]))"
    )
    before, torch, elftools = host.ask(code)
    assert before["state"] == "off"
    assert before["libraries"] == []
    assert "not built" in before["detail"]
    assert not torch
    assert not elftools
    assert not host.cache.exists()
    host.enable()
    after = host.ask(code)[0]
    assert after["state"] == "off"
    assert after["cache"] == before["cache"]
    assert after["libraries"] == ["libascendcl.so", "libhccl.so"]


def test_enable_does_not_import_torch(host: Host) -> None:
    code = "import json, sys, patchguard.cannless as c; c.enable(); print(json.dumps(sorted(sys.modules)))"
    assert not {"torch", "torch_npu"} & set(host.ask(code))


def test_a_forked_child_has_the_stand_ins(host: Host) -> None:
    done = host.run(
        """
import os
import patchguard.cannless as c
c.enable()
pid = os.fork()
if pid == 0:
    import torch
    os._exit(0 if c.enable().state == "enabled" else 3)
raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""
    )
    assert done.returncode == 0, done.stderr


def test_after_a_failed_import_of_torch_enable_says_so(host: Host) -> None:
    done = host.run(
        "import patchguard.cannless as c\n"
        "try: import torch\n"
        "except OSError: pass\n"
        "else: raise SystemExit('import torch was to fail')\n"
        "c.enable()\n"
    )
    assert "HostError" in done.stderr
    assert "before the first `import torch`" in done.stderr
    assert not host.cache.exists()


def test_torch_already_imported_without_torch_npu_is_early_enough(host: Host) -> None:
    code = """
import json, sys, types
sys.modules["torch"] = types.ModuleType("torch")  # as TORCH_DEVICE_BACKEND_AUTOLOAD=0 leaves it
import patchguard.cannless as c
c.enable()
import torch_npu
print(json.dumps(torch_npu.library.call_count()))
"""
    assert host.ask(code) == 0


# ---- the cache -------------------------------------------------------------------------------------


def test_the_cache_is_used_without_compiler_or_pyelftools(host: Host) -> None:
    folder = folder_of(host.enable())
    (folder.parent / ".lock").unlink()
    before = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    state = host.ask(
        "import json, sys; sys.modules['elftools'] = None\n"
        "import patchguard.cannless as c; print(json.dumps(c.enable().state))",
        PATH="",
    )
    assert state == "enabled"
    assert {path.name: path.stat().st_mtime_ns for path in folder.iterdir()} == before
    assert [path.name for path in folder.parent.iterdir()] == [folder.name], "nothing written beside it either"


def truncate(folder: Path) -> None:
    path = folder / "libascendcl.so"
    path.write_bytes(path.read_bytes()[:100])


def lose_library(folder: Path) -> None:
    (folder / "libhccl.so").unlink()


def lose_manifest(folder: Path) -> None:
    (folder / "manifest.json").unlink()


def cut_manifest(folder: Path) -> None:
    (folder / "manifest.json").write_text('{"sha256": {"libas')


def empty_manifest(folder: Path) -> None:
    (folder / "manifest.json").write_text('{"sha256": {}}')


def become_a_file(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.write_text("")


@pytest.mark.parametrize("damage", [truncate, lose_library, lose_manifest, cut_manifest, empty_manifest, become_a_file])
def test_a_damaged_cache_is_rebuilt(host: Host, damage: Any) -> None:
    folder = folder_of(host.enable())
    damage(folder)
    assert cannless._cached(folder) is None
    code = "import patchguard.cannless as c; c.enable(); import torch, json; print(json.dumps(c.status().state))"
    assert host.ask(code) == "enabled"
    assert host.compiled() == 4
    assert cannless._cached(folder) == ("libascendcl.so", "libhccl.so")
    assert sorted(path.name for path in folder.parent.iterdir()) == [".lock", folder.name], "nothing left behind"


def test_processes_at_once_build_once_and_all_work(host: Host) -> None:
    code = "import patchguard.cannless as c; c.enable(); import torch, torch_npu as t; "
    code += "print(t.library.call_count())"
    command = [sys.executable, "-c", code]
    started = [
        subprocess.Popen(command, env=host.env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(4)
    ]
    for process in started:
        out, error = process.communicate(timeout=300)
        assert (process.returncode, out) == (0, "0\n"), error
    assert host.compiled() == 2


def test_without_locks_a_builder_that_comes_second_takes_what_is_there(host: Host) -> None:
    # While the first one compiles, another process builds and puts its folder in place.
    done = host.run(
        """
import os, subprocess, sys
import patchguard.cannless as c

def no_locks(*_):
    raise OSError("no locks here")

c.fcntl.flock = no_locks
compile_, inner = c._compile, "import patchguard.cannless as c; c.fcntl.flock = lambda *_: None; c.enable()"
folder = c.status().cache

def compile_late(*args):
    compile_(*args)
    subprocess.run([sys.executable, "-c", inner], check=True)
    global there
    there = os.stat(folder).st_ino

c._compile = compile_late
assert c.enable().cache == folder
import torch
assert os.stat(folder).st_ino == there, "a sound folder was replaced under its users"
"""
    )
    assert done.returncode == 0, done.stderr
    assert host.compiled() == 4


@pytest.mark.parametrize("part", ["torch_npu/lib/libtorch_npu.so", "torch-9.9.1.dist-info/METADATA"])
def test_another_torch_npu_or_torch_gets_stand_ins_of_its_own(host: Host, tmp_path: Path, part: str) -> None:
    first = folder_of(host.enable())
    host.site = shutil.copytree(host.site, tmp_path / "copy")
    assert folder_of(host.enable()) == first, "the same wheel elsewhere"
    path = host.site / part
    if part.endswith(".so"):
        path.write_bytes(path.read_bytes() + bytes(8))
    else:
        path.write_text(path.read_text().replace("9.9.1", "9.9.2"))
    assert folder_of(host.enable()) != first


def test_the_cache_folder_is_argument_then_patchguards_then_xdgs_then_home(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("PATCHGUARD_CACHE", raising=False)
    assert cannless._cache_root(None) == tmp_path / "home/.cache/patchguard"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cannless._cache_root(None) == tmp_path / "xdg/patchguard"
    monkeypatch.setenv("PATCHGUARD_CACHE", str(tmp_path / "own"))
    assert cannless._cache_root(None) == tmp_path / "own"
    assert cannless._cache_root(tmp_path / "given") == tmp_path / "given"


# ---- what is wrong is said -------------------------------------------------------------------------


def test_a_missing_pyelftools_is_named(host: Host) -> None:
    done = host.run("import sys; sys.modules['elftools'] = None\nimport patchguard.cannless as c; c.enable()")
    assert "HostError" in done.stderr
    assert "pip install pyelftools" in done.stderr


def test_a_missing_compiler_is_named(host: Host) -> None:
    done = host.run("import patchguard.cannless as c; c.enable()", PATH=str(host.cache))
    assert "HostError" in done.stderr
    assert "C compiler" in done.stderr


def test_a_compiler_that_fails_is_quoted_and_leaves_no_cache(host: Host) -> None:
    (host.bin / "cc").write_text("#!/bin/sh\necho 'disk on fire' >&2\nexit 1\n")
    done = host.run("import patchguard.cannless as c; c.enable()")
    assert "HostError" in done.stderr
    assert "disk on fire" in done.stderr
    assert [path.name for path in (host.cache / "cannless").iterdir()] == [".lock"]


def test_a_cache_that_cannot_be_written_is_named(host: Host) -> None:
    host.cache.write_text("a file where a folder has to be")
    done = host.run("import patchguard.cannless as c; c.enable()")
    assert "HostError" in done.stderr
    assert str(host.cache) in done.stderr
    assert "$PATCHGUARD_CACHE" in done.stderr


def test_errors_are_patchguards() -> None:
    assert issubclass(HostError, PatchError)


# ---- nothing to do ---------------------------------------------------------------------------------


def test_a_cann_that_loads_is_left_alone(host: Host, tmp_path: Path) -> None:
    compile_library(tmp_path / "cann/libascendcl.so", "int aclInit(void) { return 0; }")
    status = host.enable(LD_LIBRARY_PATH=str(tmp_path / "cann"))
    assert status["state"] == "cann"
    assert status["libraries"] == []
    assert not host.cache.exists()


@pytest.mark.parametrize(
    ("variable", "below"),
    [("ASCEND_HOME_PATH", "lib64"), ("ASCEND_TOOLKIT_HOME", "runtime/lib64"), ("LD_LIBRARY_PATH", ".")],
)
def test_a_cann_that_is_there_but_does_not_load_is_left_alone_and_explained(
    host: Host, tmp_path: Path, variable: str, below: str
) -> None:
    # As it is without the driver, whose library CANN's own are linked against.
    driver = compile_library(tmp_path / "driver/libascend_hal.so", "void unused(void) {}")
    root = tmp_path / "cann"
    compile_library(root / below / "libascendcl.so", "int aclInit(void) { return 0; }", link=(driver,))
    shutil.rmtree(driver.parent)
    status = host.enable(**{variable: str(root)})
    assert status["state"] == "cann"
    assert "does not load" in status["detail"]
    assert str(root) in status["detail"]
    assert not host.cache.exists()


def test_a_variable_that_leads_nowhere_does_not_count_as_a_cann(host: Host, tmp_path: Path) -> None:
    status = host.ask(
        "import json, patchguard.cannless as c; print(json.dumps(c.status().as_dict()))",
        ASCEND_HOME_PATH=str(tmp_path / "absent"),
    )
    assert status["state"] == "off"


def test_without_torch_npu_there_is_nothing_to_do(tmp_path: Path) -> None:
    code = """
import importlib.util, json
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *more: None if name == "torch_npu" else find(name, *more)
import patchguard.cannless as c
print(json.dumps([c.status().as_dict(), c.enable().as_dict()]))
"""
    done = run(code, {**clean_environment(), "PATCHGUARD_CACHE": str(tmp_path / "cache")})
    assert done.returncode == 0, done.stderr
    for status in json.loads(done.stdout):
        assert status["state"] == "no-torch_npu"
        assert status["torch_npu"] is None
    assert not (tmp_path / "cache").exists()


def test_a_torch_npu_made_by_hand_in_sys_modules_is_not_an_installed_one(host: Host) -> None:
    code = """
import json, sys, types
sys.modules["torch_npu"] = types.ModuleType("torch_npu")
import patchguard.cannless as c
print(json.dumps(c.enable().state))
"""
    assert host.ask(code) == "no-torch_npu"


# ---- the real one ----------------------------------------------------------------------------------


@pytest.mark.skipif(
    importlib.util.find_spec("torch_npu") is None,
    reason="torch_npu is not installed: pip install --no-deps torch_npu==2.13.0",
)
def test_the_real_torch_npu_imports_and_has_its_operators(no_cann: None, tmp_path: Path) -> None:
    code = """
import json
import patchguard.cannless as c
status = c.enable()
import torch, torch_npu
refused = ""
try:
    torch.zeros(1, device="npu")
except RuntimeError as error:
    refused = str(error)
print(json.dumps({
    "status": status.as_dict(),
    "available": torch.npu.is_available(),
    "devices": torch.npu.device_count(),
    "schema": str(torch.ops.npu.npu_fusion_attention.default._schema),
    "refused": refused,
    "cpu": torch.ones(2).sum().item(),
}))
"""
    done = run(code, {**clean_environment(), "PATCHGUARD_CACHE": str(tmp_path)})
    assert done.returncode == 0, done.stderr
    got = json.loads(done.stdout.splitlines()[-1])
    assert got["status"]["state"] == "enabled"
    assert {"libascendcl.so", "libhccl.so"} <= set(got["status"]["libraries"])
    assert got["available"] is False
    assert got["devices"] == 0
    assert got["schema"].startswith("npu::npu_fusion_attention(Tensor query, Tensor key, Tensor value")
    assert got["refused"]
    assert got["cpu"] == 2.0
    torch_folder = cannless._package_folder("torch")
    assert torch_folder is not None
    defined = cannless._read_object(folder_of(got["status"]) / "libascendcl.so").defined
    for path in sorted((torch_folder / "lib").glob("*.so*")):
        shared = {name for name in defined & cannless._read_object(path).defined if name != cannless._MARK}
        assert not shared - {"_init", "_fini"}, f"stand-ins would take the place of {path.name}'s symbols"
