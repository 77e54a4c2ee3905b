"""What a benchmark found as one block of text to paste into an issue, and how such a block is read: as anybody's."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import date
from typing import Any

from ...checks import ConfigError
from ..environment import version_of

KEY, VERSION = "mlx_sparse_share", 1
MOST_ROWS, LONGEST = 120, 40_000  # rows and characters of a block; an issue holds 65,536
DIGITS = 4  # of a time

# A fence that no issue form opens itself.
BLOCK = re.compile(r"^```json\n(\{.*?\})\n```$", re.DOTALL | re.MULTILINE)
WORDS = re.compile(r"[\w .,:;=+()%-]*", re.ASCII)  # between backticks a page takes none of them for anything else
PATHS = re.compile(r"[^\s,:=;()]*[/\\][^\s,;]*")
ARTEFACT = re.compile(r"artefact=[^,+]*")
TEXT, NUMBER = 80, 1e15
PACKAGE = "mlx-sparse-attention"
ENDS = ("_low", "", "_high")
Check = Callable[[str, Any], Any]


def add_option(parser: argparse.ArgumentParser) -> None:
    """Give the ``parser`` of a benchmark the option --share."""
    parser.add_argument(
        "--share",
        action="store_true",
        default=argparse.SUPPRESS,  # the command's own parser has one too
        help="also print a block of text to send, of the machine and these figures (docs/results/machines.md)",
    )


def show(what: str, engine: str, machine: Mapping[str, Any], lines: Iterable[Mapping[str, Any]]) -> None:
    """Print the text to paste, below what else a benchmark has printed."""
    print(f"\n{join([found(what, engine, machine, lines)])}")


def found(what: str, engine: str, machine: Mapping[str, Any], lines: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """What one benchmark found, for `join`.

    Args:
        what: step, prompt or generate.
        machine: what the benchmark says of it.
        lines: rows as `Row.as_dict` makes them; others are left out.
    """
    rows = [line for line in lines if line.get("kind", "row") == "row"]
    timed = [_row(what, engine, row) for row in rows if row.get("turns")]
    return {
        "machine": _machine(machine),
        "wrong": sum(bool(row.get("failed")) for row in rows),
        "rows": [row for row in timed if row["times"]],
    }


def join(parts: Sequence[Mapping[str, Any]], tests: tuple[int, int] | None = None) -> str:
    """The text to paste, of benchmarks of one machine.

    Nothing of the user is in it: no names of users, hosts, files and folders, no command as it was typed.

    Args:
        tests: how many passed and failed, where they were run.
    """
    rows = [row for part in parts for row in part["rows"]]
    checks = {"right": len(rows), "wrong": sum(part["wrong"] for part in parts)}
    checks |= {} if tests is None else {"tests_passed": tests[0], "tests_failed": tests[1]}
    made = {KEY: VERSION, "date": date.today().isoformat(), "machine": dict(parts[0]["machine"]), "checks": checks}
    kept = MOST_ROWS
    while True:
        body = ",\n".join(json.dumps(row, separators=(",", ":")) for row in rows[:kept])
        about = json.dumps(made | {"left_out": max(0, len(rows) - kept)}, separators=(",", ":"))
        text = f'{about[:-1]},"rows":[\n{body}\n]}}'  # a row a line, for who looks at it
        if len(text) <= LONGEST:
            break
        kept = kept * 3 // 4
    read(text)  # what we would not take ourselves is not sent
    return f"```json\n{text}\n```"


def _row(what: str, engine: str, line: Mapping[str, Any]) -> dict[str, Any]:
    """What is kept of a row: the case, the contender, its quartiles, and how they compare with dense attention's."""
    row: dict[str, Any] = {"what": what, "engine": engine, "name": plain(line.get("contender", ""))}
    row |= _kept({name: check for name, check in ROW.items() if name not in KNOWN}, line)
    ends = {name: [line[f"{name}{end}"] for end in ENDS] for name in line if f"{name}_low" in line}
    spreads = {name: [_short(value) for value in some] for name, some in ends.items() if None not in some}
    return row | {"times": _kept(dict.fromkeys(spreads, _quartiles), spreads)}


def load() -> float:
    """How many programs want a processor: a benchmark beside others says less."""
    return round(os.getloadavg()[0], 1)


def _short(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")


def plain(value: object) -> str:
    """A text without what names a file or a folder, and without signs that a page could trip over."""
    text = PATHS.sub("FILE", ARTEFACT.sub("artefact=FILE", str(value)))
    return "".join(sign if WORDS.fullmatch(sign) else " " for sign in text).strip()[:TEXT]


def _kept(fields: Mapping[str, Check], values: Mapping[str, Any]) -> dict[str, Any]:
    """Those of ``values`` that `read` takes, which is all that is shared."""
    kept = {}
    for name, check in fields.items():
        if (value := values.get(name)) is not None:
            value = plain(value) if check is _words else _short(value) if isinstance(value, float) else value
            with contextlib.suppress(ConfigError):
                kept[name] = check(name, value)
    return kept


def _machine(facts: Mapping[str, Any]) -> dict[str, Any]:
    system = f"macOS {facts['macos']}" if "macos" in facts else _system()
    here = {"os": system, "cores": os.cpu_count(), PACKAGE: version_of(PACKAGE), **facts}
    return _kept(MACHINE, here)


def _system() -> str:
    """The system and its version, without what a machine may be called."""
    mac = platform.mac_ver()[0]
    return f"macOS {mac}" if mac else plain(f"{platform.system()} {'.'.join(platform.release().split('.')[:2])}")


# Reading


def parse(text: str) -> dict[str, Any]:
    """The block in a text such as an issue's, or that is the text.

    Raises:
        ConfigError: there is none or there are several, or it is not one of ours.
    """
    texts = [inner for inner in BLOCK.findall(text.replace("\r\n", "\n")) if f'"{KEY}"' in inner]
    if len(texts) > 1:
        raise _wrong("one block", f"{len(texts)} of them")
    return read(texts[0] if texts else text.strip())


def read(text: str) -> dict[str, Any]:
    """What the JSON of a block says, of which nothing is taken on trust.

    Raises:
        ConfigError: it says why not.
    """
    if len(text) > LONGEST:
        raise _wrong(f"at most {LONGEST:,} characters", f"{len(text):,}")
    try:
        block = json.loads(text, object_pairs_hook=_once, parse_constant=_constant)
    except (ValueError, RecursionError):
        raise _wrong("the JSON that --share prints", "something else") from None
    if not isinstance(block, dict) or block.get(KEY) != VERSION or isinstance(block.get(KEY), bool):
        raise _wrong(f"{KEY} {VERSION}", "another version or none")
    checked: dict[str, Any] = _fields(BLOCK_FIELDS, "block", block)
    if len(checked["rows"]) + checked["left_out"] != checked["checks"]["right"]:
        raise _wrong("as many rows as results that were right", f"{len(checked['rows'])}")
    return checked


def _wrong(expected: str, got: object) -> ConfigError:
    return ConfigError(f"share: expected {expected}, got {got}. Paste the block as it was printed.")


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(dict(pairs)) < len(pairs):
        raise ValueError
    return dict(pairs)


def _constant(name: str) -> float:
    raise ValueError(name)


def _words(name: str, value: Any) -> str:
    if not isinstance(value, str) or len(value) > TEXT or not WORDS.fullmatch(value):
        raise _wrong(f"{name} of at most {TEXT} plain characters", _quoted(value))
    return value


def _pattern(pattern: str, example: str) -> Check:
    compiled = re.compile(pattern, re.ASCII)

    def check(name: str, value: Any) -> str:
        if not isinstance(value, str) or not compiled.fullmatch(value):
            raise _wrong(f"{name} such as {example}", _quoted(value))
        return value

    return check


def _one_of(*choices: str) -> Check:
    def check(name: str, value: Any) -> str:
        if value not in choices:
            raise _wrong(f"{name} to be one of {', '.join(choices)}", _quoted(value))
        return str(value)

    return check


def _number(least: float, most: float = NUMBER, *, whole: bool = False) -> Check:
    def check(name: str, value: Any) -> float:
        kinds = int if whole else (int, float)
        if isinstance(value, bool) or not isinstance(value, kinds) or not least <= value <= most:
            raise _wrong(f"{name} from {least:g} to {most:g}", _quoted(value))
        return value

    return check


def _day(name: str, value: Any) -> str:
    text: str = _pattern(r"20\d\d-\d\d-\d\d", "2026-11-23")(name, value)
    try:
        date.fromisoformat(text)
    except ValueError:
        raise _wrong(f"{name} such as 2026-11-23", _quoted(value)) from None
    return text


def _quartiles(name: str, value: Any) -> list[float]:
    if not isinstance(value, list) or len(value) != 3:
        raise _wrong(f"quartiles of {name}", _quoted(value))
    low, median, high = (float(_number(0)(name, one)) for one in value)
    if not 0 < low <= median <= high:
        raise _wrong(f"quartiles of {name} in their order, above 0", _quoted(value))
    return [low, median, high]


def _times(name: str, value: Any) -> dict[str, list[float]]:
    if not isinstance(value, dict) or not 1 <= len(value) <= 8:
        raise _wrong("times of one to eight names", _quoted(value))
    known = _pattern(r"[a-z_]{1,24}", "dense_us")
    return {known("a time", key): _quartiles(key, one) for key, one in value.items()}


def _rows(name: str, value: Any) -> list[dict[str, Any]]:
    if not isinstance(value, list) or len(value) > MOST_ROWS:
        raise _wrong(f"at most {MOST_ROWS} rows", _quoted(value))
    return [_fields(ROW, "row", row) for row in value]


def _group(fields: Mapping[str, Check], needed: Sequence[str]) -> Check:
    def check(name: str, value: Any) -> dict[str, Any]:
        return _fields(fields, name, value, needed)

    return check


def _fields(fields: Mapping[str, Check], name: str, value: Any, needed: Sequence[str] = ()) -> dict[str, Any]:
    """A group of fields, each checked; no others, and all that are ``needed`` or, of a block or row, its first ones."""
    needed = needed or NEEDED[name]
    if not isinstance(value, dict) or not set(needed) <= set(value) <= set(fields):
        raise _wrong(f"a {name} with {', '.join(needed)} and known fields", _quoted(value))
    return {key: fields[key](key, one) for key, one in value.items()}


def _quoted(value: Any) -> str:
    return repr(value)[:40]


COUNT = _number(0, 1e9, whole=True)
MACHINE: Mapping[str, Check] = {
    **dict.fromkeys(("os", "chip", "architecture", "device", "model"), _words),
    **dict.fromkeys(("python", "mlx", "mlx-lm", PACKAGE, "onnxruntime", "torch", "triton"), _words),
    "memory": _number(1e6, 1e14, whole=True),
    "cores": _number(1, 1e5, whole=True),
    "load": _number(0, 1e5),
    "gpu_cores": _words,
}
ROW: Mapping[str, Check] = {
    "what": _one_of("step", "prompt", "generate"),
    "engine": _one_of("mlx", "onnx", "cuda"),
    "name": _words,
    "model": _words,
    "backend": _words,
    "kernels": _words,
    "dtype": _pattern(r"b?float\d\d|int8|kv\d", "float16"),
    "shape": _pattern(r"\d{1,4}x\d{1,4}x\d{1,4}", "32x8x128"),
    "batch": _number(1, 1e5, whole=True),
    "S": _number(1, 1e9, whole=True),
    "step": _number(1, 1e9, whole=True),
    **dict.fromkeys(("threads", "rank", "top_k"), _number(1, 1e6, whole=True)),
    "kv_bits": _number(1, 16, whole=True),
    "density": _number(0, 1),
    "dense": _words,
    "ratio": _number(0, 1e6),
    "turns": _number(1, 1e6, whole=True),
    "times": _times,
}
CHECKS: Mapping[str, Check] = dict.fromkeys(("right", "wrong", "tests_passed", "tests_failed"), COUNT)
BLOCK_FIELDS: Mapping[str, Check] = {
    KEY: _number(VERSION, VERSION, whole=True),
    "date": _day,
    "machine": _group(MACHINE, ("os", PACKAGE)),
    "checks": _group(CHECKS, ("right", "wrong")),
    "rows": _rows,
    "left_out": COUNT,
}
KNOWN = ("what", "engine", "name", "times")  # of a row, which are not copied from a line
NEEDED = {"block": tuple(BLOCK_FIELDS), "row": ("what", "engine", "name", "turns", "times")}
