"""Test scripts/compile_msl.sh with a fake compiler in place of Apple's."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from shell import ROOT, run, write_commands

SCRIPT = ROOT / "scripts" / "compile_msl.sh"
# A compiler for Metal 3.1 and 4.0 that logs its arguments and rejects bad.metal if REFUSES is set.
XCRUN = """echo "$*" >>"$0.log"
case "$*" in
  *--version) test -e "$0.toolchain"; exit ;;
  *metal3.2*) echo "invalid value 'metal3.2'" >&2; exit 1 ;;
  *-Wmetal-addr-spaces*nothing*) exit 1 ;;
esac
case "$REFUSES$*" in metal4.0*-std=metal4.0*bad.metal*) echo "attend.h:3: error" >&2; exit 1 ;; esac"""


@pytest.fixture
def dump(tmp_path: Path) -> Path:
    """Create a folder with two sources, and a fake compiler without its toolchain."""
    folder = tmp_path / "msl"
    folder.mkdir()
    for name in ("good.metal", "bad.metal", "mlx_utils.h"):
        (folder / name).write_text("")
    xcodebuild = 'touch "$(dirname "$0")/xcrun.toolchain"; echo "$*"'
    write_commands(tmp_path / "bin", {"xcrun": XCRUN, "xcodebuild": xcodebuild})
    return folder


def compiled(dump: Path, *versions: str, refuses: str = "") -> subprocess.CompletedProcess[str]:
    path = f"{dump.parent / 'bin'}:/usr/bin:/bin"
    return run("bash", SCRIPT, dump, *versions, PATH=path, REFUSES=refuses)


def test_every_source_is_compiled_for_supported_versions(dump: Path) -> None:
    done = compiled(dump)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "-downloadComponent MetalToolchain",
        "metal3.1: 2 sources compile",
        "metal3.2: not in this SDK (invalid value 'metal3.2')",
        "metal4.0: 2 sources compile",
    ]
    commands = [line.split() for line in (dump.parent / "bin" / "xcrun.log").read_text().splitlines()]
    texts = [line for line in commands if str(dump / "good.metal") in line]
    assert [line[3] for line in texts] == ["-std=metal3.1", "-std=metal4.0"]
    for line in texts:
        assert {"-Werror", "-Wall", "-Wextra", "-include", "mlx_utils.h"} < set(line)
        assert line[line.index("-isystem") + 1] == str(dump)
        assert "-Wmetal-addr-spaces" not in line


def test_compile_errors_name_the_source(dump: Path) -> None:
    done = compiled(dump, refuses="metal4.0")
    assert done.returncode == 1
    assert f"metal4.0 does not compile {dump / 'bad.metal'}" in done.stdout
    assert "good.metal" not in done.stdout
    assert "attend.h:3: error" in done.stderr
    assert "metal3.1: 2 sources compile" in done.stdout
    assert "metal4.0: 2 sources compile" not in done.stdout


@pytest.mark.parametrize("folder", ["", "none"])
def test_missing_folder_is_refused(tmp_path: Path, folder: str) -> None:
    done = run("bash", SCRIPT, *([tmp_path / folder] if folder else []))
    assert done.returncode == 2
    assert done.stderr.startswith("compile_msl.sh: error: expected a folder that scripts/dump_msl.py wrote, got")


def test_sdk_without_a_requested_version_fails(dump: Path) -> None:
    done = compiled(dump, "metal3.2")
    assert done.returncode == 1
    assert "expected an SDK with one of metal3.2, got none" in done.stderr
