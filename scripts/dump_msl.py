"""Write every MSL source that the launchers generate for the test cases.

python scripts/dump_msl.py --out FOLDER [--compile]

The script writes one file per source, mlx_utils.h and manifest.json to FOLDER. mlx_utils.h is the header that MLX
puts before every custom kernel, in the order of make_compiled_preamble.sh. MLX compiles the header and a source as
one string. Each source equals the text of MLX's export callback byte for byte. The script runs on Linux. --compile
needs clang or the `test` extra.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import shutil
import sys
import tempfile
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
from tqdm import tqdm

TESTS = Path(__file__).resolve().parents[1] / "tests"
UTILS = "mlx/backend/metal/kernels/utils.h"
HEADER, MANIFEST = "mlx_utils.h", "manifest.json"
THREADS = 2  # threads that run clang


@dataclass
class Text:
    """An MSL source and the launches that use it.

    Attributes:
        name: file name without the suffix. The name consists of the kernel and the template instance.
        kernel: name of the kernel in metal/.
        host_name: name of the function in a Metal library.
        sha256: hash of mlx_utils.h and the source together.
        size: size of the source in bytes. The header is not included.
        template: dict from the name of each template argument to its value; types have MLX's names.
        outputs: type of each output array.
        threads: largest number of threads in a threadgroup of any launch.
        threadgroup_memory: bytes of the threadgroup arrays, counted by clang; None if --compile is not set.
        call: name of the first call that generated the source.
    """

    name: str
    kernel: str
    host_name: str
    sha256: str
    size: int
    template: dict[str, Any]
    outputs: list[str]
    threads: int
    call: str
    threadgroup_memory: int | None = None
    text: str = field(default="", repr=False)


def utils() -> str:
    """Return the header that every custom kernel has.

    The header is utils.h of the installed MLX. Each included file is inserted once.
    """
    root = Path(mx.__file__).parent / "include"
    parts: dict[str, str] = {}

    def add(path: str) -> None:
        if path in parts:
            return
        lines = (root / path).read_text(encoding="utf-8").splitlines()
        for included in (m[1] for line in lines if (m := re.match(r'#include "(.+\.h)"', line))):
            add(included)
        kept = [line for line in lines if not re.search(r'#include ".*.h"|#pragma once', line)]
        parts[path] = "\n".join([f'#line 1 "{path}"', *kept, ""])

    add(UTILS)
    return "\n".join(parts.values()) + "\n"


def plain(value: Any) -> Any:
    return value if isinstance(value, int | bool) else str(value).removeprefix("mlx.core.")


def texts(calls: Iterable[Any], header: str) -> list[Text]:
    """Run ``calls`` and return the distinct MSL sources, in the order of their first use."""
    import msl

    found: dict[str, Text] = {}
    names: dict[str, int] = {}
    current = ""

    def note(generated: Any) -> None:
        launch = generated.launch
        threads = launch.threadgroup[0] * launch.threadgroup[1] * launch.threadgroup[2]
        if known := found.get(launch.text):
            known.threads = max(known.threads, threads)
            return
        name = launch.host_name.removeprefix("custom_kernel_")
        names[name] = names.get(name, 0) + 1  # several sources may have the same name; MLX adds a hash
        found[launch.text] = Text(
            name=name if names[name] == 1 else f"{name}-{names[name]}",
            kernel=generated.kernel,
            host_name=launch.host_name,
            sha256=hashlib.sha256((header + launch.text).encode()).hexdigest(),
            size=len(launch.text.encode()),
            template={key: plain(value) for key, value in generated.template.items()},
            outputs=[plain(dtype) for _, dtype in launch.outputs],
            threads=threads,
            call=current,
            text=launch.text,
        )

    with msl.emulated(record=note):
        for call in calls:
            current = call.name
            mx.eval(call.run())
    return list(found.values())


def check(text: Text) -> list[str]:
    """Lint ``text``, compile it with clang in strict mode and return the findings. Set ``text.threadgroup_memory``."""
    import msl

    try:
        typed = msl.typed(text.text)
    except (msl.CompileError, msl.TranslationError) as error:
        return [str(error)]
    text.threadgroup_memory = typed.threadgroup_memory
    return [str(finding) for finding in (*msl.lint(text.text), *typed.findings)]


def write(folder: Path, header: str, found: Sequence[Text]) -> None:
    """Write the dump to a new folder, which replaces ``folder`` when the dump is complete."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    new = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        (new / HEADER).write_text(header, encoding="utf-8")
        for text in found:
            (new / f"{text.name}.metal").write_text(text.text, encoding="utf-8")
        rows = [{key: value for key, value in asdict(text).items() if key != "text"} for text in found]
        manifest = {"mlx": mx.__version__, "header": HEADER, "texts": rows}
        (new / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
        new.chmod(0o755)
        if folder.exists():
            shutil.rmtree(folder)
        new.rename(folder)
    finally:
        shutil.rmtree(new, ignore_errors=True)


def main(argv: Sequence[str]) -> int:
    """Run the command, and return the exit code."""
    parser = argparse.ArgumentParser(
        prog="dump_msl.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", metavar="FOLDER", type=Path, required=True, help="a new folder, or an older dump")
    parser.add_argument("--compile", action="store_true", help="lint each source and compile it with clang")
    args = parser.parse_args(argv)
    if sys.platform != "linux":
        parser.error(f"expected Linux, where the harness of tests/msl runs, got {sys.platform}.")
    if args.out.exists() and not (args.out / MANIFEST).is_file():
        parser.error(f"--out: expected a new folder or an older dump, got {args.out}. Name another.")
    sys.path[:0] = [str(TESTS), str(TESTS / "testing")]
    from metal_calls import metal_calls

    header = utils()
    found = texts(tqdm(list(metal_calls()), desc="calls", unit="call", disable=None), header)
    complaints: dict[str, list[str]] = {}
    if args.compile:
        with ThreadPoolExecutor(THREADS) as pool:
            results = tqdm(pool.map(check, found), "clang", len(found), unit="text", disable=None)
            complaints = {text.name: errors for text, errors in zip(found, results, strict=True) if errors}
    write(args.out, header, found)
    kernels, size = len({text.kernel for text in found}), sum(text.size for text in found)
    print(f"{len(found)} sources of {kernels} kernels, {size:,} bytes, each with a header of {len(header.encode()):,}")
    if args.compile:
        print(f"{len(found) - len(complaints)} of {len(found)} compile with clang in the harness's strict mode")
    for name, errors in complaints.items():
        print(f"{name}:", *errors, sep="\n  ", file=sys.stderr)
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
