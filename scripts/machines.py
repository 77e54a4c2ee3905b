"""Write docs/results/machines.md from the blocks of `mlx-sparse bench --share` that were sent.

python scripts/machines.py [FILE ...]    takes in the text of an issue, checked; - is standard input
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mlx_sparse.checks import ConfigError, SparseAttentionError
from mlx_sparse.tools.bench import share
from mlx_sparse.tools.formats import table, write

RESULTS = Path(__file__).parents[1] / "docs" / "results"
BLOCKS, PAGE = RESULTS / "machines", RESULTS / "machines.md"
SECTION = re.compile(r"(?<=<!-- machines -->\n).*?(?=<!-- /machines -->)", re.DOTALL)
MOST_BYTES = 200_000  # of an issue
HEADER = ["what", "method", "backend", "type", "heads", "batch", "keys", "median (quartiles)", "over dense"]
ABOUT = {  # of a machine, and what stands before and behind it
    **dict.fromkeys(("model", "os", "device"), ("", "")),
    "cores": ("", " cores"),
    "gpu_cores": ("", " GPU cores"),
    **{name: (f"{name} ", "") for name in ("mlx", "mlx-lm", share.PACKAGE, "onnxruntime", "torch", "triton", "python")},
    "load": ("load ", ""),
}
SETTINGS = ("rank", "top_k", "threads")  # that engines tell beside a method
NO_MAC = "**No Mac has sent one yet.**"
CPU = "A CPU: says nothing about a Mac."


def main(argv: Sequence[str], blocks: Path = BLOCKS, page: Path = PAGE) -> int:
    """Take in what is sent and write the page; 1, with a line for each, if something is no block."""
    wrong = 0
    for name in argv:
        try:
            print(f"Wrote {take(_text(name), blocks).name}")
        except (SparseAttentionError, OSError) as error:
            print(f"machines.py: error: {name}: {error}", file=sys.stderr)
            wrong = 1
    write(page, written(page.read_text(encoding="utf-8"), read(blocks)).rstrip("\n"))
    return wrong


def _text(name: str) -> str:
    """At most so much of a file, whatever it is."""
    with sys.stdin.buffer if name == "-" else Path(name).open("rb") as file:
        data = file.read(MOST_BYTES + 1)
    if len(data) > MOST_BYTES:
        raise ConfigError(f"share: expected at most {MOST_BYTES:,} bytes, got more. Cut the text to the block.")
    return data.decode("utf-8", errors="replace")


def take(text: str, blocks: Path = BLOCKS) -> Path:
    """Write the block of a text to a file of its own; the same block has the same one.

    Raises:
        ConfigError: there is no block in it that can be taken.
    """
    block = json.dumps(share.parse(text), indent=1)
    path = blocks / f"{json.loads(block)['date']}-{hashlib.sha256(block.encode()).hexdigest()[:12]}.json"
    write(path, block)
    return path


def read(blocks: Path = BLOCKS) -> list[dict[str, Any]]:
    """All blocks, by chip and date. Each is checked again: somebody may have edited it.

    Raises:
        ConfigError: one is wrong, with the name of its file.
    """
    found = []
    for path in sorted(blocks.glob("*.json")):
        try:
            found.append(share.read(path.read_text(encoding="utf-8")))
        except ConfigError as error:
            raise ConfigError(f"{path.name}: {error}") from None
    return sorted(found, key=lambda block: (_chip(block), block["date"]))


def written(page: str, blocks: Sequence[Mapping[str, Any]]) -> str:
    """The page with these blocks."""
    parts = [section(block) for block in blocks]
    if not any(block["machine"]["os"].startswith("macOS") for block in blocks):
        parts.insert(0, NO_MAC)
    return SECTION.sub(lambda _: "".join(f"{part}\n\n" for part in parts), page)


def section(block: Mapping[str, Any]) -> str:
    """What is said of one machine. Its texts are others': they stand between backticks, and have none."""
    facts = block["machine"]
    about = [f"{said[0]}{facts[name]}{said[1]}" for name, said in ABOUT.items() if name in facts]
    if "memory" in facts:
        about.append(f"{facts['memory'] / 1e9:.0f} GB")
    lines = [f"## `{_chip(block)}`, {block['date']}", f"`{', '.join(about)}`. {_checks(block)}"]
    if "cpu" in facts.get("device", "").lower():
        lines[-1] += f" {CPU}"
    return "\n\n".join([*lines, table(HEADER, map(_row, block["rows"]))])


def _chip(block: Mapping[str, Any]) -> str:
    facts = block["machine"]
    return str(facts.get("chip") or facts.get("device") or facts["os"])


def _checks(block: Mapping[str, Any]) -> str:
    checks = block["checks"]
    said = f"Results: {checks['right']} right, {checks['wrong']} wrong"
    if "tests_passed" in checks:
        said += f"; tests: {checks['tests_passed']} passed, {checks.get('tests_failed', 0)} failed"
    return said + (f"; {block['left_out']} not shown." if block["left_out"] else ".")


def _row(row: Mapping[str, Any]) -> list[str]:
    times = [_time(name, spread) for name, spread in row["times"].items() if not name.endswith("_ratio")]
    ratios = [f"{name[:-6]} {spread[1]:.2f}" for name, spread in row["times"].items() if name.endswith("_ratio")]
    ratio = f"{row['ratio']:.2f}" if "ratio" in row else "; ".join(ratios)
    what = ", ".join([row["what"], *([row["engine"]] if row["engine"] != "mlx" else [])])
    what += f" `{row['model']}`" if "model" in row else ""
    kind = f"{row['kv_bits']} bits" if "kv_bits" in row else row.get("dtype", "")
    name = ", ".join([row["name"], *(f"{key}={row[key]}" for key in SETTINGS if key in row)])
    cells = [what, f"`{name}`", row.get("backend", ""), kind, row.get("shape", ""), row.get("batch", "")]
    cells[2] = f"`{cells[2]}`" if cells[2] else ""
    return [*map(str, cells), f"{row['S']:,}" if "S" in row else "", "; ".join(times), ratio]


def _time(name: str, spread: Sequence[float]) -> str:
    unit = " µs" if name.endswith("us") else ""
    low, middle, high = (f"{value:,.4g}" if value < 1000 else f"{value:,.0f}" for value in spread)
    said = name.removesuffix("us").rstrip("_").replace("_", " ")
    return f"{said} {middle} ({low} to {high}){unit}".strip()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
