"""The option ``--attn`` of mlx-lm's commands.

`run` wraps a command's ``main``: its own argument parser gains our options, its own loading of a model enables them,
and a report follows at the end. Nothing changes when the option is not given.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any

from ..checks import SparseAttentionError
from .session import Session, end, fail

SHARDS = ("context", "context:local")
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
            fail(parser, f"{option_string}: expected once, got twice. Join methods with '+'.")
        setattr(namespace, self.dest, values)


def run(main: Callable[..., Any], command: str) -> Any:
    """Run ``main`` of the mlx-lm command ``command`` with our options added to it."""
    session = Session(command)
    try:
        with (
            _options_in_first_parser(session),
            _enabled_on_load(session, main),
            _suites(session),
            _interrupted_by_sigterm(session),
            session.ending(),
            session.meanwhile,
        ):
            return main()
    except SparseAttentionError as error:
        end(command, str(error))
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
        "--shard",
        choices=SHARDS,
        help="Under mlx.launch, let every process run the whole model and hold a part of the keys and values: each "
        "attends its own, with the result of one process. With 'context:local' each also chooses among its own "
        "keys alone, which takes fewer messages (default: mlx-lm's own sharding of the model).",
    )
    group.add_argument(
        "--lossless",
        nargs="?",
        const=0,
        type=int,
        metavar="N",
        help="Give the tokens of dense attention: the method drafts N tokens (1 to 7), one dense call over the same "
        "cache checks them, and what it would not have said is taken back (default N: as many as give most tokens per "
        "second, none where dense steps do).",
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
def _options_in_first_parser(session: Session) -> Iterator[None]:
    """Extend the first parser that parses: the command's own, whose arguments no one else has to repeat."""
    original = argparse.ArgumentParser.parse_args

    def parse_args(parser: argparse.ArgumentParser, args: Any = None, namespace: Any = None) -> Any:
        argparse.ArgumentParser.parse_args = original  # type: ignore[method-assign]
        if session.suites:
            parser.prog = session.command  # mlx-lm gives its description as the name
        add_options(parser)
        parsed = None
        try:
            parsed = original(parser, args, namespace)
            session.configure(parser, parsed)
        except SystemExit as refusal:
            if refusal.code:
                session.meet(parser, parsed, refused=True)
            raise
        session.meet(parser, parsed)
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
        "save_prompt_cache": session.save,
    }
    # Commands import some of them by value.
    places = [(where, name) for where in (vars(utils), getattr(main, "__globals__", {})) for name in ours]
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
