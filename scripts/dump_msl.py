"""Write every MSL source that the launchers generate for the test cases.

python scripts/dump_msl.py --out FOLDER [--compile]

The script writes one file per source and mlx_utils.h to FOLDER. mlx_utils.h is the header that MLX puts before every
custom kernel, in the order of make_compiled_preamble.sh. MLX compiles the header and a source as one string. Each
source equals the text of MLX's export callback byte for byte. The script runs on Linux. --compile needs clang or the
`test` extra.
"""

from __future__ import annotations

import argparse
import re
import shutil
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
from tqdm import tqdm

from mlx_sparse.files import new_folder

TESTS = Path(__file__).resolve().parents[1] / "tests"
UTILS = "mlx/backend/metal/kernels/utils.h"
HEADER = "mlx_utils.h"
THREADS = 2  # threads that run clang


@dataclass
class Text:
    """An MSL source. ``name`` is the file name without suffix: the name of the kernel and of the template instance."""

    name: str
    kernel: str
    text: str


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


def texts(calls: Iterable[Any]) -> list[Text]:
    """Run ``calls`` and return the distinct MSL sources, in the order of their first use."""
    import msl

    found: dict[str, Text] = {}
    names: Counter[str] = Counter()

    def note(generated: Any) -> None:
        text = generated.launch.text
        if text not in found:
            name = generated.launch.host_name.removeprefix("custom_kernel_")
            names[name] += 1  # several sources may have the same name; MLX adds a hash
            found[text] = Text(name if names[name] == 1 else f"{name}-{names[name]}", generated.kernel, text)

    with msl.emulated(record=note):
        for call in calls:
            mx.eval(call.run())
    return list(found.values())


def check(text: Text) -> list[str]:
    """Lint ``text``, compile it with clang in strict mode and return the findings."""
    import msl

    try:
        findings = msl.typed(text.text).findings
    except (msl.CompileError, msl.TranslationError) as error:
        return [str(error)]
    return [str(finding) for finding in (*msl.lint(text.text), *findings)]


def write(folder: Path, header: str, found: Sequence[Text]) -> None:
    """Write the dump to a new folder, which replaces ``folder`` when the dump is complete."""
    with new_folder(folder) as new:
        (new / HEADER).write_text(header, encoding="utf-8")
        for text in found:
            (new / f"{text.name}.metal").write_text(text.text, encoding="utf-8")
        if folder.exists():
            shutil.rmtree(folder)


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
    if args.out.exists() and not (args.out / HEADER).is_file():
        parser.error(f"--out: expected a new folder or an older dump, got {args.out}. Name another.")
    sys.path[:0] = [str(TESTS), str(TESTS / "testing")]
    from metal_calls import metal_calls

    header = utils()
    found = texts(tqdm(list(metal_calls()), desc="calls", unit="call", disable=None))
    complaints: dict[str, list[str]] = {}
    if args.compile:
        with ThreadPoolExecutor(THREADS) as pool:
            results = tqdm(pool.map(check, found), "clang", len(found), unit="text", disable=None)
            complaints = {text.name: errors for text, errors in zip(found, results, strict=True) if errors}
    write(args.out, header, found)
    kernels, size = len({text.kernel for text in found}), sum(len(text.text.encode()) for text in found)
    print(f"{len(found)} sources of {kernels} kernels, {size:,} bytes, each with a header of {len(header.encode()):,}")
    if args.compile:
        print(f"{len(found) - len(complaints)} of {len(found)} compile with clang in the harness's strict mode")
    for name, errors in complaints.items():
        print(f"{name}:", *errors, sep="\n  ", file=sys.stderr)
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
