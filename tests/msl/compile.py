"""Compile Metal text with clang to a shared library, cached by content, and check address spaces as types."""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from .translate import translate

HERE = Path(__file__).parent
CACHE = HERE.parents[1] / ".cache" / "msl"
PRELUDE = '#include <metal_stdlib>\nusing namespace metal;\n#include "mlx/backend/metal/kernels/utils.h"\n'
HALF = ["-Xclang", "-ffloat16-excess-precision=none", "-Xclang", "-fbfloat16-excess-precision=none"]
HALF += ["-mf16c"] if Path("/proc/cpuinfo").is_file() and " f16c" in Path("/proc/cpuinfo").read_text() else []
COMMON = ["-x", "c++", "-fsigned-char", "-nostdinc++", "-fno-sanitize=all", "-U_FORTIFY_SOURCE"]
PREPROCESS = [*COMMON, "-std=c++20", "-E", "-w", "-DMSL_PREPROCESS", "-D__METAL__=1", "-D__METAL_VERSION__=320"]
RUN = [*COMMON, *HALF, "-std=c++20", "-c", "-w", "-O1", "-g1", "-gdwarf-4", "-fPIC", "-fno-exceptions", "-fno-rtti"]
RUN += ["-fno-strict-aliasing", "-fno-math-errno", "-ffp-contract=off", "-fno-vectorize", "-fno-slp-vectorize"]
RUN += ["-fno-lax-vector-conversions", "-ftrivial-auto-var-init=pattern"]
RUN += ["-fsanitize=array-bounds,shift-exponent,integer-divide-by-zero"]
RUN += ["-Xclang", "-fsanitize=thread"]  # through -Xclang, because zig drops the plain option
STACK = ["-fno-omit-frame-pointer", "-mno-omit-leaf-frame-pointer"]  # the runtime compares call stacks ...
RUN += [*STACK, "-fconvergent-functions"]
LLVM = ["tsan-instrument-func-entry-exit=0", "tsan-instrument-read-before-write=1"]
LLVM += ["enable-tail-merge=0", "sink-common-insts=0", "hoist-common-insts=0"]  # ... and needs distinct locations
RUN += [word for option in LLVM for word in ("-mllvm", f"-{option}")]
RUNTIME = [*COMMON, *HALF, *STACK, "-std=c++20", "-c", "-O2", "-fPIC", "-fno-exceptions", "-fno-rtti"]
LINK = ["-shared", "-nostdlib++", "-O2", "-Wl,-z,defs", "-Wl,-rpath,$ORIGIN", "-lm"]
# MSL is C++14, and C++17 since Metal 4. The warnings are errors of Apple's compiler, or its warnings with -Werror,
# also at run time: ml-explore/mlx-lm#814 (sign), ml-explore/mlx#1868 and google/filament#6217 (variables),
# ggml-org/llama.cpp#10211 (constants), halide/Halide#5912 (functions), ollama/ollama#15548 (uninitialized)
TYPED = [*COMMON, *HALF, "-std=c++17", "-c", "-O0", "-DMSL_TYPED=1", "-fno-lax-vector-conversions"]
TYPED += ["-Wall", "-Wextra", "-Wunused-const-variable", "-Wno-duplicate-decl-specifier"]  # macros: `const constant`
TYPED += ["-Wc++20-extensions", "-Wimplicit-float-conversion", "-Wno-implicit-int-float-conversion"]
THREADGROUP_MEMORY = 32 << 10  # tinygrad/tinygrad#9458
# A symbol name contains the size of each threadgroup array.
SIZES = "namespace msl { template <int, unsigned long> void* reserved(); }\n"
SIZES += "#define msl_shared(number, bytes, ...) msl::reserved<number, bytes>()\n"


class CompileError(RuntimeError):
    """Compilation error of a kernel. The message is the output of the compiler."""


@functools.cache
def compiler() -> tuple[str, ...]:
    """Return the clang command: $MSL_CXX, clang++ 19 to 22 on PATH, or the clang of the ziglang wheel."""
    if given := os.environ.get("MSL_CXX"):
        return tuple(given.split())
    for name in ("clang++-22", "clang++-21", "clang++-20", "clang++-19", "clang++"):
        path = shutil.which(name)
        if path and _major(path) >= 19:
            return (path,)
    if (wheel := importlib.util.find_spec("ziglang")) and wheel.origin:
        # Do not use `python -m ziglang`: starting Python for two thousand calls takes minutes.
        return (str(Path(wheel.origin).with_name("zig")), "c++")
    raise CompileError("no compiler for Metal kernels: install clang 19 or newer, or `pip install ziglang`")


def _major(path: str) -> int:
    done = subprocess.run([path, "-dumpversion"], capture_output=True, text=True, check=False)
    return int(done.stdout.split(".")[0]) if done.stdout.split(".")[0].isdigit() else 0


def _call(arguments: Sequence[str | Path], text: str | None = None) -> str:
    done = subprocess.run([*compiler(), *arguments], input=text, capture_output=True, text=True, check=False)
    if done.returncode:
        raise CompileError(done.stderr.strip())
    return done.stdout


@functools.cache
def _key() -> str:
    version = subprocess.run([*compiler(), "--version"], capture_output=True, text=True, check=False).stdout
    parts = [version, *compiler(), *RUN, *RUNTIME, *LINK]
    parts += [p.read_text() for p in (HERE / "runtime.cpp", HERE / "include" / "abi.h", HERE / "include" / "msl.h")]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _build(target: Path, flags: Sequence[str], text: str, link: Sequence[str | Path]) -> Path:
    """Compile and link `target` unless it exists, and rename it at the end, so that other processes see whole files."""
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        source, made, library = (Path(folder) / n for n in ("k.cpp", "k.o", "k.so"))
        source.write_text(text)
        _call([*flags, "-I", HERE / "include", source, "-o", made])
        _call([made, *link, *LINK, "-o", library])
        source.replace(target.with_suffix(".cpp"))
        library.replace(target)
    return target


@functools.cache
def runtime() -> Path:
    """Build the shared library of the runtime, which all kernels of a process use. Return its path."""
    target = CACHE / f"runtime-{_key()}.so"
    return _build(target, RUNTIME, (HERE / "runtime.cpp").read_text(), [f"-Wl,-soname,{target.name}"])


def preprocess(source: str, include: Sequence[Path] = (), flags: Sequence[str] = ()) -> str:
    """Expand macros and #include lines. Markers preserve file names and line numbers."""
    import mlx.core as mx

    folders = [HERE / "include", *include, Path(mx.__file__).parent / "include"]
    text = f'{PRELUDE}#line 1 "source"\n{source}'
    return _call([*PREPROCESS, *flags, *(f"-I{folder}" for folder in folders), "-"], text)


@functools.cache
def build(source: str, name: str, constants: tuple[tuple[int | str, object], ...], include: tuple[Path, ...]) -> Path:
    """Build the shared library of a kernel and return its path. The translated text is stored in the same folder."""
    text = translate(preprocess(source, include), name, dict(constants))
    text = '#include "msl.h"\n' + text
    key = hashlib.sha256((_key() + text).encode()).hexdigest()[:24]
    return _build(CACHE / f"{key}.so", RUN, text, [runtime()])


def typed_check(
    source: str, *, constants: Mapping[int | str, object] | None = None, include: Sequence[Path] = ()
) -> list[str]:
    """Compile all kernels of a text with typed address spaces, and return the errors."""
    return typed(source, constants=constants, include=include).findings


class Typed(NamedTuple):
    """Result of a compilation with typed address spaces: errors, and bytes of all threadgroup arrays."""

    findings: list[str]
    threadgroup_memory: int


def typed(source: str, *, constants: Mapping[int | str, object] | None = None, include: Sequence[Path] = ()) -> Typed:
    """Compile like `typed_check`. Return the errors and the bytes of all threadgroup arrays in the text."""
    text = f'#include "msl.h"\n{SIZES}' + translate(
        preprocess(source, include, ["-DMSL_TYPED=1"]), None, constants or {}
    )
    with tempfile.TemporaryDirectory() as folder:
        path, made = Path(folder) / "k.cpp", Path(folder) / "k.o"
        path.write_text(text)
        command = [*compiler(), *TYPED, "-isystem", str(HERE / "include"), str(path), "-o", str(made)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        reserved = _reserved(made) if made.exists() else 0
    found = re.findall(r"(?m)^(.*?:\d+):\d+: ((?:fatal )?error|warning): (.*)$", done.stderr)
    legal = re.compile(r"loses floating-point precision(?!.* to '[^']*' \(aka '__bf16'\))")  # float to half
    findings = [f"{kind.upper()} {message} at {place}" for place, kind, message in found if not legal.search(message)]
    if reserved > THREADGROUP_MEMORY:
        findings.append(f"ERROR {reserved} bytes of threadgroup arrays, {THREADGROUP_MEMORY} is the most")
    return Typed(findings, reserved)


def _reserved(made: Path) -> int:
    """Return the total bytes of the threadgroup arrays, from the symbols in the object file `made`."""
    from elftools.elf.elffile import ELFFile

    with made.open("rb") as file:
        names = [symbol.name for symbol in ELFFile(file).get_section_by_name(".symtab").iter_symbols()]
    sizes = {m[1]: int(m[2]) for name in names if (m := re.search(r"8reservedILi(\d+)ELm(\d+)E", name))}
    return sum(sizes.values())
