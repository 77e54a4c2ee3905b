"""SIGTERM ends a run with ``--attn`` after its report, also where MLX waits for another rank and never comes back."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from .session import Session

CODE = 128 + signal.SIGTERM
PATIENCE = 3.0  # seconds in which Python calls the handler, unless its main thread waits inside MLX
LAST = 15.0  # in which a rank that was interrupted has ended


def exit_now() -> NoReturn:
    """End the process with what was printed: threads of a command may live on, or abort in MLX."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(CODE)


@contextlib.contextmanager
def interrupted_by_sigterm(session: Session) -> Iterator[None]:
    """Let SIGTERM end a run with ``--attn`` after its report, unless somebody handles it already."""
    ends, reached = threading.Lock(), threading.Event()  # `ends` is whose thread ends the run

    def interrupt(signum: int, frame: FrameType | None) -> None:
        if not reached.is_set() and not ends.acquire(blocking=False):
            return
        reached.set()
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
    hears, told = socket.socketpair()
    told.setblocking(False)
    signal.signal(signal.SIGTERM, interrupt)
    before = signal.set_wakeup_fd(told.fileno(), warn_on_full_buffer=False)
    threading.Thread(target=_end_anyway, args=(session, hears, ends, reached), daemon=True).start()
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.set_wakeup_fd(before)
        told.close()


def _end_anyway(session: Session, hears: socket.socket, ends: threading.Lock, reached: threading.Event) -> None:
    """End a rank that SIGTERM does not end: Python calls no handler while MLX waits for a rank that has ended."""
    with hears:
        while (signals := hears.recv(64)) and signal.SIGTERM not in signals:
            pass
    if not signals:
        return
    reached.wait(PATIENCE)
    if session.watch is None:
        return
    if ends.acquire(blocking=False):
        session.leave_at_once()
    else:
        time.sleep(LAST)
    exit_now()
