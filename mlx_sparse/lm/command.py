"""The option ``--attn`` of mlx-lm's commands.

`run` wraps a command's ``main``: its own argument parser gains our options, its own loading of a model enables them,
and a report follows at the end. Nothing changes when the option is not given.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import logging
import os
import signal
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from ..checks import ConfigError, SparseAttentionError
from ..common import families
from ..common.call_report import JSON_KEY, Counts, Report, listing
from ..methods import NEVER, Method, Prefill, parse, read_toml, registry

if TYPE_CHECKING:
    from ..calibrate import Calibration
    from .plan import Plan

REPORTS = ("text", "mass", "json", "json+mass", "off")


class _Once(argparse.Action):
    """Store a value, and refuse the option the second time."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        if getattr(namespace, self.dest) is not None:
            _fail(parser, f"{option_string}: expected once, got twice. Join methods with '+'.")
        setattr(namespace, self.dest, values)


class Session:
    """One run of a command with ``--attn``."""

    def __init__(self, command: str) -> None:
        self.command = command
        self.only_prompts = command.endswith("cache_prompt")
        self.suites = command.endswith("evaluate")
        self.serves = command.endswith("server")
        self.configs: tuple[Method, ...] = ()
        self.prefill: Prefill | None = None
        self.decode: Method | None = None
        self.backend = "auto"
        self.report_as = "text"
        self.calibration: Calibration | None = None
        self.max_tokens: int | None = None
        self.max_kv_size: int | None = None
        self.draft: str | None = None
        self.loading: str | None = None
        self.reports: dict[tuple[str, tuple[Method, ...]], Report] = {}  # by model and methods
        self.requests: dict[str, Any] = {}  # of suites, by kind: the calls they made
        self.loads = self.loads_at_start = 0
        self.loads_part = False  # whether mlx-lm is loading what it will cut
        self.terminated = False
        self.meanwhile = contextlib.ExitStack()  # what is undone when the command ends

    def configure(self, parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
        """Check our options and their company before anything is loaded; a mistake ends the program here."""
        from ..calibrate import Calibration
        from .hooks import hooks_of
        from .model import select_methods

        self.report_as = args.attn_report
        if args.attn is None and args.attn_config is None:
            return
        calibrates = not args.no_calibrate
        try:
            base: dict[str, Method] = {}
            if args.attn_config is not None:
                base, options = read_toml(args.attn_config)
                calibrates = calibrates and options.calibrate
            configs = parse(args.attn, base) if args.attn is not None else tuple(base.values())
            if not any(config.sparse for config in configs):
                return
            prefill, decode = select_methods(configs)
            for config in configs:
                registry.require(args.attn_backend, config.name)
                hooks_of(config).check(config)
        except SparseAttentionError as error:
            _fail(parser, str(error))
        names = "+".join(config.name for config in configs)
        if "mass" in self.report_as and prefill is None:
            _fail(parser, f"--attn-report: expected text, json or off with --attn {names}, got {self.report_as}.")
        prompt_cache = getattr(args, "prompt_cache_file", None)
        if prompt_cache is not None and not self.only_prompts and not Path(prompt_cache).is_file():
            _fail(parser, f"--prompt-cache-file: expected a file, got {prompt_cache}.")
        if getattr(args, "kv_bits", None) is not None:
            _fail(parser, f"--kv-bits: expected none with --attn {names}, which reads unquantised keys. Drop one.")
        if self.suites and prefill is not None and args.batch_size > 1:
            args.batch_size = 1
            print(f"[mlx-sparse] --batch-size 1: {prefill.name} takes prompts without padding.", file=sys.stderr)
        self.configs, self.prefill, self.decode = configs, prefill, decode
        self.backend = args.attn_backend
        self.calibration = Calibration(
            measures=calibrates, piece=getattr(args, "prefill_step_size", 2048), say=self.say
        )
        self.max_tokens = getattr(args, "max_tokens", None) if self.command.endswith("generate") else None
        self.max_kv_size = getattr(args, "max_kv_size", None)
        self.draft = getattr(args, "draft_model", None)
        self.loads_at_start = sum(getattr(args, name, None) is not None for name in ("model", "draft_model"))
        if self.serves:
            from . import serving

            self.meanwhile.enter_context(serving.shown(self))

    def find(self, original: Callable[..., Any], model: str, *args: Any, **kwargs: Any) -> Any:
        """mlx-lm's search for a model, on disk or on the hub."""
        self.loads += not self.loads_part
        self.loading = model
        with self._ending_the_program(), loading(model):
            return original(model, *args, **kwargs)

    def load(self, original: Callable[..., Any], model: Path, *args: Any, **kwargs: Any) -> Any:
        """mlx-lm's ``load_model`` with the methods enabled on what it loads."""
        with self._ending_the_program():
            with loading(model):
                if self.max_kv_size is not None:
                    refuse_rotating_cache(Path(model))
                loaded = original(model, *args, **kwargs)
            if not self.loads_part:
                self._enable(loaded[0], str(model))
        return loaded

    def load_part(self, original: Callable[..., Any], model: str, *args: Any, **kwargs: Any) -> Any:
        """mlx-lm's ``sharded_load``, which cuts what it has loaded: the methods are enabled on this process's part."""
        self.loads += 1
        self.loads_part = True
        try:
            loaded = original(model, *args, **kwargs)
        finally:
            self.loads_part = False
        with self._ending_the_program():
            self._enable(loaded[0], str(model))
        return loaded

    def _enable(self, model: Any, path: str) -> None:
        """Enable the methods on a loaded model; one that was loaded before goes on in its report."""
        from .model import enable, plan_of

        configs = self.configs
        if self.loading == self.draft:
            # An artefact is the model's, and no other's.
            configs = tuple(config for config in configs if config.file is None)
        if not configs:
            return
        report = enable(
            model, configs, backend=self.backend, mass="mass" in self.report_as, calibration=self.calibration
        )
        plan = plan_of(model)
        assert plan is not None
        report.model = Path(path).name
        plan.count_in(self.reports.setdefault((path, configs), report))
        plan.decodes = not self.only_prompts
        if (known := families.warning(report.model_type)) is not None:
            self.say(known)
        if self.report_as in ("text", "mass"):
            self._say_outlook(plan)

    def _say_outlook(self, plan: Plan) -> None:
        """What will happen, before the first token."""
        lines = plan.report.opening()
        if any(config.measurable for config in plan.configs):
            lines.append("dense_below=N in --attn decides otherwise")
        self.say("; ".join(lines))
        if self.max_tokens is not None and plan.decodes:
            plan.watch = functools.partial(self._watch, plan)

    def _watch(self, plan: Plan, S: int, counts: Counts) -> None:
        """Say so if nothing will be sparse; ``counts`` are those of the first step, over ``S`` keys."""
        prompts = plan.report.prefill
        if counts.sparse_calls or (prompts is not None and prompts.calls):
            return
        starts, longest = plan.sparse_from(), S + (self.max_tokens or 0)
        if S < starts <= longest:
            return
        if longest < starts < NEVER:
            why = f"this run has at most {longest:,} keys, and no step with fewer than {starts:,} is"
        else:  # something else is in the way, or there are no steps to be sparse
            why = f"calls so far: {listing(plan.report.dense_calls)}"
        self.say(f"nothing will be sparse: {why}")

    def say(self, text: str) -> None:
        """Tell the user, on standard error."""
        if self.report_as != "off":
            print(f"[mlx-sparse] {text}", file=sys.stderr, flush=True)

    def log(self, text: str) -> None:
        """Tell who keeps the command's log."""
        if self.report_as != "off":
            logging.info(f"[mlx-sparse] {text}")

    @contextlib.contextmanager
    def _ending_the_program(self) -> Iterator[None]:
        """The server loads on a thread of its own, and would live on without the model it was started with."""
        try:
            yield
        except SparseAttentionError as error:
            if self.loads <= self.loads_at_start and threading.current_thread() is not threading.main_thread():
                _print_error(self.command, str(error))
                os._exit(2)
            raise

    def calls(self) -> Counts:
        """The calls of all models so far, with the number of those of prompts; None where prompts stay dense."""
        found = [report.calls() for report in list(self.reports.values())]
        return Counts(
            sum(counts.sparse_calls for counts in found),
            sum((counts.dense_calls for counts in found), Counter()),
            prefill=None if self.prefill is None else sum(counts.prefill.calls for counts in found if counts.prefill),
        )

    def as_dict(self) -> dict[str, Any]:
        """The reports as plain data for JSON."""
        requests = {"requests": self.requests} if self.requests else {}
        return {JSON_KEY: [report.as_dict() for report in list(self.reports.values())]} | requests

    def print_report(self) -> None:
        """The call report on standard error, so that the text on standard output stays the model's."""
        if "json" in self.report_as:
            print(json.dumps(self.as_dict()), file=sys.stderr)
        elif self.report_as != "off":
            for report in self.reports.values():
                print(f"[mlx-sparse] {report}", file=sys.stderr)


def run(main: Callable[..., Any], command: str) -> Any:
    """Run ``main`` of the mlx-lm command ``command`` with our options added to it."""
    session = Session(command)
    try:
        with (
            _options_in_first_parser(session),
            _enabled_on_load(session, main),
            _suites(session),
            _interrupted_by_sigterm(session),
            session.meanwhile,
        ):
            return main()
    except SparseAttentionError as error:
        _exit(command, str(error))
    finally:
        if session.reports:
            session.print_report()
        if session.terminated:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(128 + signal.SIGTERM)  # threads of the command may live on, or abort in MLX


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the group of options to a command's parser."""
    group = parser.add_argument_group(
        "sparse attention",
        "Process prompts with one sparse attention method and decode with another, or either alone "
        "(mlx-sparse-attention). What has no method stays dense.",
    )
    group.add_argument(
        "--attn",
        action=_Once,
        metavar="METHOD[:KEY=VALUE,...][+METHOD...]",
        help="Method and parameters, for example 'sample', 'sparq:rank=16,top_k=256' or both, 'sample+sparq'. "
        "'mlx-sparse matrix' lists the methods and their stages (default: dense attention).",
    )
    group.add_argument(
        "--attn-config",
        action=_Once,
        metavar="FILE.toml",
        help="Parameters from a TOML file with one table per method; --attn wins over it.",
    )
    group.add_argument(
        "--attn-backend",
        default="auto",
        metavar="NAME",
        help="What runs the method: 'metal' (our kernels, on Apple GPUs), 'ops' (MLX array operations), or 'auto', "
        "metal where it can run (default: auto).",
    )
    group.add_argument(
        "--no-calibrate",
        action="store_true",
        help="Measure nothing: from what context on a method is sparse is left to a documented model, unless this "
        "machine has been measured before. Otherwise the first context that is long enough is measured, once for each "
        "model's shape, in at most 10 seconds.",
    )
    group.add_argument(
        "--attn-report",
        choices=REPORTS,
        default="text",
        help="How to say at the end, on standard error, which calls were sparse, which dense and why, and what that "
        "saved (default: text). 'mass' and 'json+mass' also measure the attention mass that prompts retain, which "
        "takes a dense pass over the keys.",
    )


@contextlib.contextmanager
def loading(model: object) -> Iterator[None]:
    """Say in one line what went wrong with finding or reading ``model``.

    Raises:
        ConfigError: in place of what mlx-lm and the hub raise.
    """
    try:
        yield
    except SparseAttentionError:
        raise
    except (OSError, ValueError, RecursionError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ConfigError(f"--model: expected a model that mlx-lm can load, got {model} ({reason}).") from None


def refuse_rotating_cache(model_path: Path) -> None:
    """Raise `ConfigError` if ``--max-kv-size`` gives the model in ``model_path`` rotating caches; do not load it."""
    from mlx_lm import utils

    config = utils.load_config(model_path)
    model_class, _ = utils._get_classes(config)
    if not hasattr(model_class, "make_cache"):
        raise ConfigError(
            f"--max-kv-size: expected none with --attn for {config.get('model_type')}, whose caches it makes rotating, "
            "which no method here reads. Drop one."
        )


@contextlib.contextmanager
def _options_in_first_parser(session: Session) -> Iterator[None]:
    """Extend the first parser that parses: the command's own, whose arguments no one else has to repeat."""
    original = argparse.ArgumentParser.parse_args

    def parse_args(parser: argparse.ArgumentParser, args: Any = None, namespace: Any = None) -> Any:
        argparse.ArgumentParser.parse_args = original  # type: ignore[method-assign]
        if session.suites:
            parser.prog = session.command  # mlx-lm gives its description as the name
        add_options(parser)
        parsed = original(parser, args, namespace)
        session.configure(parser, parsed)
        return parsed

    argparse.ArgumentParser.parse_args = parse_args  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        argparse.ArgumentParser.parse_args = original  # type: ignore[method-assign]


@contextlib.contextmanager
def _enabled_on_load(session: Session, main: Callable[..., Any]) -> Iterator[None]:
    """Enable the session's methods, if it gets any, on every model that mlx-lm loads meanwhile, draft models too."""
    from mlx_lm import utils

    ours: dict[str, Callable[..., Any]] = {
        "load_model": session.load,
        "_download": session.find,
        "sharded_load": session.load_part,
    }
    # Commands import one of them by value.
    places = [(vars(utils), name) for name in ours] + [(getattr(main, "__globals__", {}), "sharded_load")]
    originals = [(place, name, place[name]) for place, name in places if name in place]

    def replaced(original: Callable[..., Any], own: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            return original(*args, **kwargs) if not session.configs else own(original, *args, **kwargs)

        return call

    for place, name, original in originals:
        place[name] = replaced(original, ours[name])
    try:
        yield
    finally:
        for place, name, original in originals:
            place[name] = original


@contextlib.contextmanager
def _interrupted_by_sigterm(session: Session) -> Iterator[None]:
    """Let SIGTERM end a run with ``--attn`` after its report, unless somebody handles it already."""

    def interrupt(signum: int, frame: FrameType | None) -> None:
        if session.configs:
            session.terminated = True
            raise SystemExit  # not as Control-C, after which the server finishes what it has begun
        signal.signal(signum, signal.SIG_DFL)
        signal.raise_signal(signum)

    if (
        threading.current_thread() is not threading.main_thread()
        or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
    ):
        yield
        return
    signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _suites(session: Session) -> contextlib.AbstractContextManager[None]:
    if not session.suites:
        return contextlib.nullcontext()
    from . import lm_eval

    return lm_eval.scored(session)


def _fail(parser: argparse.ArgumentParser, message: str) -> Any:
    """End the program with one line; argparse's own error prints the whole usage before it."""
    _exit(parser.prog, message)


def _exit(program: str, message: str) -> Any:
    _print_error(program, message)
    raise SystemExit(2)


def _print_error(program: str, message: str) -> None:
    print(f"{program}: error: {message}", file=sys.stderr, flush=True)
