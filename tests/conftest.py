"""Fixtures that several test files share, where Triton's kernels run, and what cannot run on the oldest Python."""

import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import tier as tiers
from absent import without
from require import required

if importlib.util.find_spec("mlx"):
    from mlx_sparse import calibrate

# Triton reads this when its kernels are defined. Without an NVIDIA GPU they run on the CPU, in its interpreter.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Workers have a processor each: threads of a product would only wait for those of another worker.
if "PYTEST_XDIST_WORKER" in os.environ:
    for library in ("OPENBLAS", "OMP"):
        os.environ.setdefault(f"{library}_NUM_THREADS", "1")

# They need mlx, which machines with an NVIDIA GPU do without (scripts/gpu_check.sh).
MODELS = ["fixtures_msl", "fixtures_smollm2"] if importlib.util.find_spec("mlx") else []
pytest_plugins = ["fixtures_onnx", "fixtures_triton", *MODELS]

# onnxruntime 1.31 and the tools of the site need Python 3.11. triton has wheels for Linux only: modules of its kernels
# import it.
OLD = "on this Python" if sys.version_info < (3, 11) else ""
NO_TRITON = "" if importlib.util.find_spec("triton") or required("triton") else "without triton"
NOT_HERE = {"*test_onnx_*.py": OLD, "test_site.py": OLD, "*test_triton_*.py": NO_TRITON}
collect_ignore_glob = [names for names, why in NOT_HERE.items() if why]


# It fetches 240 MB whose licence is not an open-source one.
REAL_GEMMA = "test_gemma3_real.py"


# The slow tier: these take half a minute or more, or start dozens of processes. They come first, so that no worker
# is left alone with them at the end.
SLOW = {
    "test_advise.py": "commands",
    "test_calibrate.py": "timings",
    "test_demo.py": "the demo",
    "test_doctor.py": "commands",
    "test_evaluate_command.py": "commands",
    "test_examples.py": "commands, a browser",
    "test_fast_blas.py": "commands",
    "test_gpu_check.py": "reports",
    "test_install.py": "installations",
    "test_lm_commands.py": "commands",
    "test_lm_evaluate.py": "commands",
    "test_lm_load.py": "many requests at once",
    "test_lm_ranks.py": "several processes",
    "test_lm_saap_commands.py": "commands",
    "test_lm_server.py": "commands",
    "test_lm_context.py": "several processes",
    "test_lm_threads.py": "many threads",
    "test_mac_check.py": "reports",
    "test_metal_barriers.py": "kernels with a barrier taken away",
    "test_metal_traffic.py": "counts of bytes",
    "test_missing_packages.py": "environments",
    "test_models_table.py": "tiny models of all families",
    "test_onnx_bench.py": "benchmarks",
    "test_onnx_genai.py": "another runtime",
    "test_onnx_native.py": "instruction sets, threads, another machine's code",
    "test_onnx_native_fuzz.py": "fuzzing, sanitizers",
    "test_onnx_run.py": "a real model",
    "test_onnx_runtimes.py": "other runtimes",
    "test_onnx_saap_fuzz.py": "fuzzing",
    "test_onnx_sample_export.py": "whole models",
    "test_saap_train_command.py": "commands",
    "test_saap_train_smollm2.py": "a real model",
    "test_site.py": "the site",
    "test_smollm2.py": "a real model",
    "test_cache_histories.py": "random histories",
    "test_triton_aot.py": "compiling for GPUs that are not here",
    "test_triton_bench.py": "benchmarks",
    "test_triton_hf.py": "models of transformers",
    "test_tune.py": "commands",
}
# A tier runs this many of the instances of a test, evenly spread, for every backend that it is parametrised by.
MOST = 2
BACKENDS = ("backend", "runtime")
# Where each instance takes a second or more, it runs so many at most, with backends or without.
COSTLY = {
    "test_baselines.py": 3,
    "test_lm_drafts.py": 10,
    "test_lm_load.py": 3,
    "test_lm_saap.py": 8,
    "test_lm_threads.py": 4,
    "test_metal_attend_blocks.py": 3,
    "test_metal_attend_rows.py": 2,
    "test_metal_barriers.py": 3,
    "test_metal_kernels.py": 2,
    "test_metal_packed.py": 3,
    "test_metal_saap.py": 2,
    "test_metal_traffic.py": 2,
    "test_missing_packages.py": 5,
    "test_msl_conformance.py": 8,
    "test_onnx_export.py": 5,
    "test_onnx_export_quantized.py": 8,
    "test_onnx_genai.py": 5,
    "test_onnx_native.py": 30,
    "test_onnx_runtimes.py": 3,
    "test_onnx_sample_export.py": 4,
    "test_oracle_sample.py": 4,
    "test_triton_bench.py": 1,
    "test_triton_hf.py": 2,
    "test_triton_traffic.py": 4,
}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--accept-licence", choices=["gemma"], help=f"accept the Gemma Terms of Use: run {REAL_GEMMA}")
    parser.addoption("--fast", action="store_true", help="the fast tier: no slow files, a few instances of each test")
    parser.addoption("--every", action="store_true", help=f"not just {MOST} instances of a test for each backend")


def pytest_configure(config: pytest.Config) -> None:
    tiers.every = config.getoption("every")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    name = collection_path.name
    left_out = name == REAL_GEMMA and not config.getoption("accept_licence")
    return True if left_out or (name in SLOW and config.getoption("fast")) else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.name not in SLOW)
    left_out: set[pytest.Item] = set()
    if config.getoption("fast"):
        left_out = set(thinned(items, MOST))
    elif not config.getoption("every"):
        named = [item for item in items if any(name in _parameters(item) for name in BACKENDS)]
        left_out = set(thinned(named, MOST))
        for name, most in COSTLY.items():
            left_out.update(thinned([item for item in items if item.path.name == name], most))
    if left_out:
        config.hook.pytest_deselected(items=list(left_out))
        items[:] = [item for item in items if item not in left_out]


def _parameters(item: pytest.Item) -> dict[str, object]:
    return dict(getattr(getattr(item, "callspec", None), "params", {}))


def thinned(items: list[pytest.Item], most: int) -> list[pytest.Item]:
    """All but ``most`` instances of each test and backend, evenly spread over its cases."""
    instances: dict[tuple[str, ...], list[pytest.Item]] = {}
    for item in items:
        parameters = _parameters(item)
        backend = next((str(parameters[name]) for name in BACKENDS if name in parameters), "")
        instances.setdefault((item.nodeid.partition("[")[0], backend), []).append(item)
    left_out = []
    for rows in instances.values():
        # One of each of so many parts, at another place in each: every so manyth would have one value of a parameter.
        kept = {int((n + n * 0.618 % 1) * len(rows) / most) for n in range(most)}
        left_out += [row for n, row in enumerate(rows) if n not in kept and len(rows) > most]
    return left_out


def pytest_report_header(config: pytest.Config) -> list[str]:
    absent = [f"not collected {NOT_HERE[name]}: {name}" for name in collect_ignore_glob]
    if not config.getoption("accept_licence"):
        absent.append(f"not collected without --accept-licence gemma: {REAL_GEMMA}")
    return [*tier(config), *absent]


def tier(config: pytest.Config) -> list[str]:
    if not config.getoption("fast"):
        every = config.getoption("every")
        return ["tier: everything" if every else f"tier: at most {MOST} instances of a test for each backend (--every)"]
    files = ", ".join(f"{name} ({what})" for name, what in SLOW.items())
    return [f"tier: fast, which runs at most {MOST} instances of a test for each backend and leaves out {files}"]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if config.getoption("fast"):
        terminalreporter.write_line("This was the fast tier. Everything: python3 scripts/dev.py test --all")


@pytest.fixture(scope="session", autouse=True)
def _no_calibration(tmp_path_factory: pytest.TempPathFactory) -> None:
    """What the user has measured on this machine decides nothing here."""
    folder = tmp_path_factory.mktemp("measured") / "calibration"
    if MODELS:
        calibrate.folder = lambda: folder


@pytest.fixture
def calibration_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where this test's measurements go."""
    folder = tmp_path / "measured" / "calibration"
    folder.parent.mkdir()
    monkeypatch.setattr(calibrate, "folder", lambda: folder)
    return folder


@pytest.fixture(scope="module")
def without_torch() -> Iterator[dict[str, str]]:
    """What this module starts sees no torch: where there is one, transformers imports it, for two seconds a start."""
    environment = without("torch")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        yield environment
