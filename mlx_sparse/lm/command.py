"""The option ``--attn`` of mlx-lm's commands.

`run` wraps a command's ``main``: its own argument parser gains our options, its own loading of a model enables them,
and a report follows at the end. Nothing changes when the option is not given.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from ..checks import SparseAttentionError
from .distributed.ranks import lost
from .options import add_options, end
from .session import Session


def run(main: Callable[..., Any], command: str) -> Any:
    """Run ``main`` of the mlx-lm command ``command`` with our options added to it."""
    session = Session(command)
    try:
        with _options_in_first_parser(session), _enabled_on_load(session, main), _suites(session), session.meanwhile:
            return main()
    except SparseAttentionError as error:
        end(command, str(error))
    except RuntimeError as error:
        if session.ranks.size == 1 or (line := lost(error)) is None:
            raise
        end(command, line)
    finally:
        if session.reports:
            session.print_report()


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


def _suites(session: Session) -> contextlib.AbstractContextManager[None]:
    if not session.suites:
        return contextlib.nullcontext()
    from . import lm_eval

    return lm_eval.scored(session)
