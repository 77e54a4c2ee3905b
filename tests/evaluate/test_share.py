"""`mlx-sparse bench --share`: one block to paste, with nothing private in it, and read as anybody's."""

from __future__ import annotations

import copy
import getpass
import json
import platform
import re
from pathlib import Path
from typing import Any

import machines
import pytest

from mlx_sparse import cli
from mlx_sparse.checks import ConfigError
from mlx_sparse.tools.bench import share
from mlx_sparse.tools.bench.core import Case, Row, Shape, Spread

ROOT = Path(__file__).parents[2]
STEP = ["bench", "step", "--shapes", "4x2x32", "--lengths", "200", "--dtype", "float32", "--repeat", "2"]
SECRET = "/Users/jane doe/thesis/index.npz"

ROW = {"what": "step", "engine": "mlx", "name": "sparq", "shape": "32x8x128", "S": 4096, "turns": 9}
ROW |= {"times": {"dense_us": [1.0, 2.0, 3.0]}, "ratio": 2.5}
GOOD: dict[str, Any] = {
    share.KEY: 1,
    "date": "2026-11-23",
    "machine": {"os": "macOS 26.1", share.PACKAGE: "0.1.0"},
    "checks": {"right": 1, "wrong": 0},
    "left_out": 0,
    "rows": [ROW],
}


def row(name: str = "sparq", **details: Any) -> dict[str, Any]:
    spreads: dict[str, Spread | None] = {"dense_us": Spread(1, 2, 3, 1), "sparse_us": Spread(1, 1.23456789, 2, 1)}
    return Row(Case("float16", Shape(4, 2, 32), 1, 200), name, None, details, spreads, turns=3).as_dict()


def changed(path: str, value: Any) -> dict[str, Any]:
    """`GOOD` with another value at a dotted path."""
    block = copy.deepcopy(GOOD)
    *parents, last = path.split(".")
    inside: Any = block
    for name in parents:
        inside = inside[int(name) if name.isdecimal() else name]
    inside[last] = value
    return block


# what is printed


def test_a_benchmark_ends_with_a_block_that_can_be_read(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*STEP, "--attn", "sparq:rank=4,top_k=30,streaming", "--share"]) == 0
    printed = capsys.readouterr().out
    assert printed.index("| method |") < printed.index("```json")
    assert printed.endswith("\n]}\n```\n")
    block = share.parse(printed)
    assert [found["name"] for found in block["rows"]] == ["sparq:rank=4,top_k=30", "streaming"]
    assert block["checks"] == {"right": 2, "wrong": 0}
    for found in block["rows"]:
        low, median, high = found["times"]["sparse_us"]
        assert 0 < low <= median <= high
        assert found["ratio"] == pytest.approx(found["times"]["dense_us"][1] / median, rel=2e-3)
        assert (found["backend"], found["shape"], found["S"], found["turns"]) == ("ops", "4x2x32", 200, 2)
    assert {"chip", "cores", "load", "memory", "mlx", "mlx-lm", "python"} <= set(block["machine"])


def test_alone_it_measures_a_few_steps_and_prompts(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlx_sparse.tools.bench import command

    few = ["--shapes", "4x2x32", "--dtype", "float32", "--repeat", "2", "--lengths"]
    monkeypatch.setitem(command.SHORT, "cpu", [["step", *few, "200"], ["prompt", *few, "256"]])
    monkeypatch.setitem(command.SHORT, "gpu", [["step", *few, "200"], ["prompt", *few, "256"]])
    assert cli.main(["bench", "--share"]) == 0
    assert [found["what"] for found in share.parse(capsys.readouterr().out)["rows"]] == ["step", "prompt"]


def test_what_it_measures_alone_can_be_planned() -> None:
    from mlx_sparse.tools.bench import command

    for sets in command.SHORT.values():
        for argv in sets:
            request, _ = command.read(command._parser("mlx", "").parse_args(argv))
            assert request.stage == argv[0]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["bench"], "required: WHAT, or --share"),
        ([*STEP, "--share", "-o", "json"], "--share: expected it with -o md, got -o json"),
    ],
)
def test_it_is_not_mixed_with_what_programs_read(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        assert cli.main(argv) == 2
    except SystemExit as ended:
        assert ended.code == 2
    assert message in capsys.readouterr().err


def test_nothing_private_is_in_it() -> None:
    lines = [
        row(f"saap:artefact={SECRET},probes=4", note=f"cannot read {SECRET}", backend=SECRET),
        row("C:\\jane\\a b"),
    ]
    facts = {"chip": "Apple M4", "platform": f"Linux-{platform.node()}", "command": SECRET, "device": SECRET}
    text = share.join([share.found("step", "mlx", facts, lines)])
    for secret in ("jane", "thesis", "npz", "Users", "platform", "note"):
        assert secret not in text
    if len(getpass.getuser()) > 2 and len(platform.node()) > 2:
        assert getpass.getuser() not in text.replace("parse", "") and platform.node() not in text
    assert share.parse(text)["rows"][0]["name"] == "saap:artefact=FILE,probes=4"


def test_times_have_four_digits_and_rows_without_times_are_left_out() -> None:
    untimed = row() | {"turns": 0, "note": "too large"}
    found = share.found("step", "mlx", {}, [row(), untimed, untimed | {"failed": True}, {"kind": "bar"}])
    assert found["wrong"] == 1
    assert [one["times"]["sparse_us"] for one in found["rows"]] == [[1.0, 1.235, 2.0]]


def test_what_could_not_be_read_is_not_sent() -> None:
    odd = row(ratio=float("nan"), threads="many", density=2.0) | {"dense_us_low": 9.0, "dtype": "a type"}
    (found,) = share.found("step", "mlx", {"memory": -1, "chip": "M4|M5"}, [odd])["rows"]
    assert set(found) == {"what", "engine", "name", "shape", "batch", "S", "turns", "times"}
    assert list(found["times"]) == ["sparse_us"]
    block = share.parse(share.join([share.found("step", "mlx", {"memory": -1, "chip": "M4|M5"}, [odd])]))
    assert (block["machine"].get("memory"), block["machine"]["chip"]) == (None, "M4 M5")


def test_a_long_one_is_cut_and_says_so() -> None:
    lines = [row(f"sparq:rank={number},top_k=100") for number in range(1, 2 * share.MOST_ROWS)]
    text = share.join([share.found("step", "mlx", {}, lines)], (3, 1))
    block = share.parse(text)
    assert len(text) <= share.LONGEST + 20
    assert 0 < len(block["rows"]) <= share.MOST_ROWS
    assert len(block["rows"]) + block["left_out"] == len(lines) == block["checks"]["right"]
    assert (block["checks"]["tests_passed"], block["checks"]["tests_failed"]) == (3, 1)


# what is read


def test_a_block_is_found_in_the_text_of_an_issue() -> None:
    fenced = f"```json\n{json.dumps(GOOD)}\n```"
    for text in (
        json.dumps(GOOD),
        fenced,
        f"### The block\r\n\r\n{fenced}\n\n### What ran beside it\n```json\n{{}}\n```",
    ):
        assert share.parse(text) == GOOD
    with pytest.raises(ConfigError, match="expected one block, got 2 of them"):
        share.parse(f"{fenced}\n{fenced}")


HOSTILE: dict[str, Any] = {
    "another version": changed(share.KEY, 2),
    "a version that is true": changed(share.KEY, True),
    "a field that is not known": changed("extra", 1),
    "a field of a row that is not known": changed("rows.0.note", "hello"),
    "no machine": {key: value for key, value in GOOD.items() if key != "machine"},
    "a machine that is a list": changed("machine", []),
    "HTML": changed("machine.chip", "<script>alert(1)</script>"),
    "a cell of a table": changed("machine.chip", "M4 | M5"),
    "a link": changed("rows.0.name", "[x](javascript:1)"),
    "a backtick": changed("machine.device", "gpu` ![x](y) `"),
    "a line": changed("machine.device", "gpu\n# Title"),
    "somebody's name": changed("machine.model", "@everyone"),
    "a sign that is not ASCII": changed("machine.chip", "M4\u202e"),
    "a long text": changed("machine.chip", "x" * 81),
    "a number for a text": changed("machine.chip", 4),
    "a day that is none": changed("date", "2026-02-30"),
    "a day with more": changed("date", "2026-11-23\n"),
    "a shape with a path": changed("rows.0.shape", "../../x"),
    "a stage": changed("rows.0.what", ["step"]),
    "an engine": changed("rows.0.engine", "rocm"),
    "keys below one": changed("rows.0.S", 0),
    "keys that are true": changed("rows.0.S", True),
    "keys that are no whole number": changed("rows.0.S", 4096.5),
    "many keys": changed("rows.0.S", 10**30),
    "a ratio below nothing": changed("rows.0.ratio", -1),
    "quartiles in no order": changed("rows.0.times", {"dense_us": [3.0, 2.0, 1.0]}),
    "a time of nothing": changed("rows.0.times", {"dense_us": [0, 1, 2]}),
    "two quartiles": changed("rows.0.times", {"dense_us": [1, 2]}),
    "no times": changed("rows.0.times", {}),
    "times by a long name": changed("rows.0.times", {"x" * 25: [1, 2, 3]}),
    "many times": changed("rows.0.times", {"abcdefghi"[i]: [1, 2, 3] for i in range(9)}),
    "many rows": changed("rows", [ROW] * (share.MOST_ROWS + 1)),
    "fewer rows than results": changed("checks.right", 2),
    "a negative count": changed("checks.wrong", -1),
}
TEXTS = {
    "nothing": "",
    "no JSON": "hello",
    "a list": "[]",
    "deep": "[" * 30_000,
    "not a number": json.dumps(GOOD).replace("2.5", "NaN"),
    "without end": json.dumps(GOOD).replace("2.5", "1e999"),
    "a key twice": json.dumps(GOOD).replace('"left_out"', '"date"'),
    "too long": json.dumps(GOOD)[:-1] + " " * share.LONGEST + "}",
    "digits": json.dumps(GOOD).replace("2.5", "1" * 9000),
}


@pytest.mark.parametrize("name", [*HOSTILE, *TEXTS])
def test_what_is_no_block_is_refused_in_one_line(name: str) -> None:
    with pytest.raises(
        ConfigError, match=r"^share: expected .*, got .*\. Paste the block as it was printed\.$"
    ) as caught:
        share.parse(TEXTS[name] if name in TEXTS else json.dumps(HOSTILE[name]))
    assert len(str(caught.value)) < 250
    assert "\n" not in str(caught.value)


# the page


def test_the_page_is_the_generated_one() -> None:
    text = machines.PAGE.read_text(encoding="utf-8")
    blocks = machines.read()
    assert blocks
    assert machines.written(text, blocks) == text, "python scripts/machines.py writes it anew"
    assert (machines.NO_MAC in text) == (not any(block["machine"]["os"].startswith("macOS") for block in blocks))


def test_what_is_sent_becomes_a_file_and_a_part_of_the_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page, sent, blocks = tmp_path / "machines.md", tmp_path / "issue.txt", tmp_path / "machines"
    blocks.mkdir()
    page.write_text("# Machines\n\n<!-- machines -->\n<!-- /machines -->\n")
    sent.write_text(f"### The block\n\n{share.join([share.found('step', 'mlx', {'chip': 'Some chip'}, [row()])])}\n")
    for _ in range(2):  # the same one again is the same file
        assert machines.main([str(sent)], blocks, page) == 0
    (file,) = blocks.iterdir()
    assert re.fullmatch(r"20\d\d-\d\d-\d\d-[0-9a-f]{12}\.json", file.name)
    assert "## `Some chip`, " in page.read_text()
    assert (
        "| step | `sparq` |  | float16 | 4x2x32 | 1 | 200 | dense 2 (1 to 3) µs; sparse 1.235 (1 to 2) µs |"
        in page.read_text()
    )
    before = page.read_text()
    sent.write_text("hello")
    capsys.readouterr()
    assert machines.main([str(sent), str(tmp_path / "none")], blocks, page) == 1
    assert capsys.readouterr().err.count("\n") == 2
    assert page.read_text() == before
    file.write_text(file.read_text().replace("Some chip", "<b>"))
    with pytest.raises(ConfigError, match=rf"^{re.escape(file.name)}: share: expected chip "):
        machines.read(blocks)


def test_the_form_asks_for_the_block() -> None:
    form = (ROOT / ".github" / "ISSUE_TEMPLATE" / "machine.yml").read_text(encoding="utf-8")
    assert f'```json\n        {{"{share.KEY}":{share.VERSION}' in form
    assert "mlx-sparse bench --share" in form
    assert "render:" not in form, "GitHub would put the block's fence into one of its own"


def test_speeds_over_dense_attention_are_told_by_name() -> None:
    times = {"prompt": [1.0, 2.0, 3.0], "prompt_ratio": [1.0, 1.5, 2.0]}
    told = machines.section(changed("rows", [{**ROW, "what": "generate", "model": "SmolLM2", "times": times}]))
    assert "| generate `SmolLM2` |" in told
    row = {name: value for name, value in ROW.items() if name != "ratio"} | {"what": "generate", "times": times}
    told = machines.section(changed("rows", [row]))
    assert "prompt 2 (1 to 3) | prompt 1.50 |" in told
