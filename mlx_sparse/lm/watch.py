"""Ranks that listen for one another while a command runs: each ends, with one line, when another is lost.

Rank 0 is in the middle: the others are connected to it over TCP and say about once a second that they are there, and
what they have counted so far, so that rank 0 can report for all of them without asking. Numbers and words alone go this
way; tokens and weights go MLX's.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import select
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from ..checks import SparseAttentionError, shortened
from .options import print_error
from .ranks import Ranks, address_of_first

BEAT = 1.0  # seconds between two words of a rank
SILENCE = 8.0  # after which it is lost
LATE = 3.0  # after which a rank that was itself stopped, and hears all at once, judges nobody
FAREWELL = 2.0  # that one which ends waits for the others' last words
GRACE = 2.0  # for the others to fail by themselves, after one has failed: they may have the same mistake
PAUSE = 0.3  # for MLX, which tells of its lost connections letter by letter, to have a line of its own
CONNECT = 5.0
READ = 1 << 16

ENDED, SILENT = "was lost: its process ended", "was lost: it does not answer"


class Peer:
    """A connection to another rank.

    Attributes:
        heard: when it last said something.
        gone: whether it has said goodbye, or that it has failed.
    """

    def __init__(self, sock: socket.socket) -> None:
        sock.settimeout(FAREWELL)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sock = sock
        self.heard = time.monotonic()
        self.gone = False
        self._begun = b""
        self._sending = threading.Lock()

    def say(self, **words: Any) -> None:
        """Send a line; a peer that cannot take it is noticed where it is listened to."""
        with self._sending, contextlib.suppress(OSError):
            self.sock.sendall(json.dumps(words).encode() + b"\n")

    def hear(self) -> list[dict[str, Any]] | None:
        """The lines that have come; None at the end of the connection."""
        try:
            data = self.sock.recv(READ)
        except OSError:
            data = b""
        if not data:
            return None
        self.heard = time.monotonic()
        *lines, self._begun = (self._begun + data).split(b"\n")
        return [json.loads(line) for line in lines]

    def end(self) -> None:
        """Nothing more will be said; what was said still arrives."""
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_WR)


class Watch:
    """What this rank knows of the others, from `start` on until it says goodbye.

    Args:
        program: begins the line that is printed when one is lost.
        hosts: by rank.
        peers: by rank; for rank 0 all others, for them rank 0.
        count: what this rank has counted so far, plain data for JSON, without waiting for anything.
        report: is called before the process ends, if it does because of another; it must not wait either.

    Attributes:
        leaving: whether this rank ends, so that nothing that happens from here on is a loss.
        told: by rank, what each of the others last said that it had counted; on rank 0.
    """

    def __init__(
        self,
        program: str,
        ranks: Ranks,
        hosts: list[str],
        peers: dict[int, socket.socket],
        count: Callable[[], Any],
        report: Callable[[], object],
    ) -> None:
        self.ranks, self.told = ranks, dict[int, Any]()
        self._program, self._hosts, self._count, self._report = program, hosts, count, report
        self._peers = {rank: Peer(sock) for rank, sock in peers.items()}
        self.leaving = False
        self._failed: tuple[int, str, float] | None = None  # who, how, and when it was said
        self._patient = True  # with one that has failed
        self._alarmed, self._over = threading.Event(), threading.Event()
        self._wake, self._woken = socket.socketpair()
        self._thread = threading.Thread(target=self._run, name="mlx-sparse-watch", daemon=True)

    def start(self) -> None:
        """Begin to listen."""
        self._thread.start()

    def leave(self, numbers: Any) -> None:
        """Say goodbye, with the last ``numbers``; rank 0 waits a moment for those of the others."""
        self._give_way()
        if self.leaving:
            return
        self.leaving = True
        if self.ranks.rank:
            self._say(bye=numbers)
        self._finish()
        if not self.ranks.rank:
            self._say(bye=None)
            self._part()

    def fail(self, reason: str) -> None:
        """Say that this rank ends, by a mistake of its own."""
        if self.leaving:
            return
        self.leaving = True
        self._say(failed=[self.ranks.rank, reason])
        self._finish()
        self._part()

    def hush(self) -> None:
        """All ranks end now, and know why."""
        self.leaving = True

    def end(self, error: BaseException, numbers: Callable[[], Any]) -> None:
        """This rank ends by ``error``. If that is because of another rank, the process ends here, in one line."""
        self._give_way()
        if isinstance(error, KeyboardInterrupt) or (isinstance(error, SystemExit) and not error.code):
            self.leave(numbers())
            return
        if not isinstance(error, (SystemExit, SparseAttentionError)) and not self.leaving:
            # MLX may tell of a lost connection before this has heard of it.
            self._patient = False
            self._alarmed.wait(GRACE)
            self._give_way()
            left = [rank for rank, peer in self._peers.items() if peer.gone]
            if left:
                self._pass_on(left[0], lost=[left[0], "has ended"])
                self._last_words(left[0], "has ended")
        self.fail(_in_a_line(error))

    def _give_way(self) -> None:
        """Wait where the watch is about to end the process."""
        if self._alarmed.is_set():
            threading.Event().wait()

    def _say(self, **words: Any) -> None:
        for peer in self._peers.values():
            peer.say(**words)

    def _finish(self) -> None:
        """Let the thread end: it listens for the others' last words."""
        self._wake.send(b"!")
        self._over.wait(2 * FAREWELL)

    def _part(self) -> None:
        """End the connections so that all that was said arrives: what is read must not be thrown away."""
        peers = [peer for peer in self._peers.values() if not peer.gone]
        for peer in peers:
            peer.end()
        until = time.monotonic() + FAREWELL / 2
        for peer in peers:
            peer.sock.settimeout(max(0.01, until - time.monotonic()))
            while peer.hear() is not None and time.monotonic() < until:
                pass

    def _run(self) -> None:
        try:
            self._listen()
        finally:
            self._over.set()

    def _listen(self) -> None:
        beaten = turned = time.monotonic()
        until = float("inf")
        while True:
            open_peers = {peer.sock: rank for rank, peer in self._peers.items() if not peer.gone}
            readable, _, _ = select.select([*open_peers, self._woken], [], [], BEAT / 4)
            now = time.monotonic()
            if now - turned > LATE:
                for peer in self._peers.values():
                    peer.heard = now
            turned = now
            for sock in readable:
                if sock is self._woken:
                    self._woken.recv(READ)
                else:
                    self._hear(open_peers[sock])
            if self.leaving:
                until = min(until, now + FAREWELL)
                if now >= until or all(peer.gone for peer in self._peers.values()):
                    return
                continue
            if now - beaten >= BEAT:
                beaten = now
                self._say(**({"counted": self._count()} if self.ranks.rank else {"beat": None}))
            for rank, peer in self._peers.items():
                if not peer.gone and now - peer.heard > SILENCE:
                    self._lose(rank, SILENT)
            if self._failed is not None and now - self._failed[2] > GRACE * self._patient:
                self._alarm(self._failed[0], f"failed: {self._failed[1]}")

    def _hear(self, rank: int) -> None:
        peer = self._peers[rank]
        lines = peer.hear()
        if lines is None:
            peer.gone = True
            if not self.leaving:
                self._lose(rank, ENDED)
            return
        for words in lines:
            if "counted" in words:
                self.told[rank] = words["counted"]
            elif "bye" in words:
                if words["bye"] is not None:
                    self.told[rank] = words["bye"]
                peer.gone = True
                peer.end()
            elif "failed" in words:
                who, reason = words["failed"]
                peer.gone = True
                peer.end()
                self._failed = self._failed or (who, reason, time.monotonic())
                self._pass_on(rank, failed=[who, reason])
            elif "lost" in words and not self.leaving:
                self._alarm(*words["lost"])

    def _pass_on(self, rank: int, **words: Any) -> None:
        """Rank 0 tells the others what it has heard of one."""
        if self.ranks.rank == 0:
            for other, peer in self._peers.items():
                if other != rank:
                    peer.say(**words)

    def _lose(self, rank: int, how: str) -> None:
        self._peers[rank].gone = True
        if self._failed is not None:  # whose end the other has noticed first
            rank, how = self._failed[0], f"failed: {self._failed[1]}"
        self._pass_on(rank, lost=[rank, how])
        self._alarm(rank, how)

    def _alarm(self, rank: int, how: str) -> None:
        self._alarmed.set()
        self._last_words(rank, how)

    def _last_words(self, rank: int, how: str) -> None:
        """Print the line and the report, and end the process: its threads may wait for the other rank for ever."""
        self.leaving = True
        time.sleep(PAUSE)
        print_error(self._program, f"rank {rank} ({self._hosts[rank]}) {how.rstrip('.')}.")
        in_time(self._report)
        self._part()
        in_time(lambda: (sys.stdout.flush(), sys.stderr.flush()))
        os._exit(1)


def in_time(call: Callable[[], Any], seconds: float = FAREWELL) -> Any:
    """What ``call`` returns, on a thread of its own; None if it raises, or takes longer."""
    found: list[Any] = []

    def run() -> None:
        with contextlib.suppress(Exception):
            found.append(call())

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    return found[0] if found else None


def _in_a_line(error: BaseException) -> str:
    """What went wrong, for other ranks to say."""
    if isinstance(error, SystemExit):
        return f"it ended with code {error.code}"
    text = (str(error).strip().splitlines() or [""])[0]
    name = type(error).__name__
    return text if isinstance(error, SparseAttentionError) else shortened(f"{name}: {text}" if text else name)


class Door:
    """Where rank 0 lets the others in; an empty one on other ranks."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self._server: socket.socket | None = None
        if ranks.rank:
            return
        host = address_of_first()
        try:
            self._server = socket.create_server((host or "", 0), backlog=ranks.size)
        except OSError:  # what the others call this machine is none of its own addresses
            self._server = socket.create_server(("", 0), backlog=ranks.size)
        self._word = secrets.token_hex(8)
        self._place = (host or socket.gethostname(), self._server.getsockname()[1])

    def told(self) -> list[Any] | None:
        """What the others have to know to `enter`."""
        return None if self._server is None else [*self._place, self._word]

    def enter(self, told: list[Any]) -> dict[int, socket.socket]:
        """The connections of a `Watch`; none if some rank cannot be connected. All ranks call this.

        Args:
            told: by rank 0.
        """
        host, port, word = told
        peers: dict[int, socket.socket] = {}
        if self._server is None:
            with contextlib.suppress(OSError):
                peers[0] = socket.create_connection((host, port), CONNECT)
                peers[0].sendall(f"{word} {self.ranks.rank:08}".encode())
        if all(self.ranks.gather(self._server is not None or 0 in peers)):
            self._let_in(peers)
        return peers if all(self.ranks.gather(bool(peers))) else {}

    def _let_in(self, peers: dict[int, socket.socket]) -> None:
        if self._server is None:
            return
        self._server.settimeout(CONNECT)
        with contextlib.suppress(OSError, ValueError):
            while len(peers) < self.ranks.size - 1:
                sock, _ = self._server.accept()
                sock.settimeout(CONNECT)
                word, _, rank = (
                    sock.recv(len(self._word) + 9, socket.MSG_WAITALL).decode(errors="replace").partition(" ")
                )
                if secrets.compare_digest(word.encode(), self._word.encode()):  # anybody can knock
                    peers[int(rank)] = sock
        self._server.close()
        if len(peers) < self.ranks.size - 1:
            peers.clear()
