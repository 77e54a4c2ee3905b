"""Add ``--attn`` to the commands of mlx-lm and mlx-vlm.

`run` wraps the ``main`` of a command and adds the sparse attention options to the argument parser. `run` enables the
methods on each model that the command loads, and prints a report at the end. If ``--attn`` is not set, the command does
not change.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
from collections.abc import Callable, Iterator, Sequence

from ..checks import SparseAttentionError
from .options import add_options, end
from .ranks import connection_error
from .session import Session


def run(main: Callable[[], object], command: str) -> object:
    """Run ``main``, the entry point of a ``command`` of mlx-lm or mlx-vlm, with the sparse attention options."""
    session = Session(command)
    try:
        with _options_in_first_parser(session), _enabled_on_load(session, main), session.exit_stack:
            if session.suites:
                from . import lm_eval

                session.exit_stack.enter_context(lm_eval.sparse_evaluation(session))
            return main()
    except SparseAttentionError as error:
        end(command, str(error))
    except RuntimeError as error:
        if session.ranks.size == 1 or (line := connection_error(error)) is None:
            raise
        end(command, line)
    finally:
        if session.reports:
            session.print_report()


@contextlib.contextmanager
def _options_in_first_parser(session: Session) -> Iterator[None]:
    """Add the sparse attention options to the first parser that parses arguments, which is the command's parser."""
    original = argparse.ArgumentParser.parse_args

    def parse_args(
        parser: argparse.ArgumentParser, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> argparse.Namespace:
        argparse.ArgumentParser.parse_args = original  # type: ignore[method-assign]
        if session.suites:
            parser.prog = session.command  # mlx-lm passes the description in place of the program name
        add_options(parser)
        parsed = None
        try:
            parsed = original(parser, args, namespace)
            session.configure(parser, parsed)
            if session.configs and session.serves:
                from . import serving

                session.exit_stack.enter_context(serving.request_logging(session))
        except SystemExit as refusal:
            if refusal.code:
                session.handshake(parser, parsed, refused=True)
            raise
        session.handshake(parser, parsed)
        return parsed

    argparse.ArgumentParser.parse_args = parse_args  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        argparse.ArgumentParser.parse_args = original  # type: ignore[method-assign]


@contextlib.contextmanager
def _enabled_on_load(session: Session, main: Callable[[], object]) -> Iterator[None]:
    """Enable the session's methods on each model and draft model that the library loads inside the ``with`` block."""
    utils = importlib.import_module(f"{session.library}.utils")
    ours: dict[str, Callable[..., object]] = {
        "load_model": session.load,
        "_download" if session.library == "mlx_lm" else "get_model_path": session.find,
        "sharded_load": session.load_part,
        "maybe_quantize_kv_cache": session.quantize,
    }
    if session.library == "mlx_lm":  # mlx-vlm shows a bar
        ours["stream_generate"] = session.stream
    # Commands import some of these functions by value, so replace them in the globals of `main` too.
    scopes = [vars(utils), getattr(main, "__globals__", {})]
    if session.library == "mlx_lm":
        scopes.append(vars(importlib.import_module("mlx_lm.generate")))
    distinct = {id(scope): scope for scope in scopes}.values()
    places = [(scope, name) for scope in distinct for name in ours]
    originals = [(place, name, place[name]) for place, name in places if name in place]

    def replaced(original: Callable[..., object], own: Callable[..., object]) -> Callable[..., object]:
        alone = getattr(original, "without_variable", original)  # --attn takes precedence over MLX_SPARSE_ATTN

        def call(*args: object, **kwargs: object) -> object:
            if session.configs:
                return own(alone, *args, **kwargs)
            return (alone if session.named else original)(*args, **kwargs)

        return call

    for place, name, original in originals:
        place[name] = replaced(original, ours[name])
    try:
        yield
    finally:
        for place, name, original in originals:
            place[name] = original
