"""Add to `mlx_lm.server` a log line about sparse attention for each request.

The server has one thread for each connection. Another thread runs the model for all requests, and one forward pass may
serve several requests. So the log line of a request includes all calls between the start and the end of the request.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..api.call_report import Counts, listing
from ..calibrate import WRITING

if TYPE_CHECKING:
    from mlx_lm.server import GenerationContext, ResponseGenerator

    from .session import Session

SECONDS_TO_STOP = 0.5  # time that a request and a calibration get to end after Ctrl-C


@dataclass(eq=False)
class Request:
    """Request that the server is answering.

    Attributes:
        before: call counts of all models at the start of the request.
        concurrent: largest number of concurrent requests so far, including this request.
        tokens: number of tokens generated so far.
    """

    before: Counts
    concurrent: int = 1
    tokens: int = 0


class Requests:
    """All requests that the server is answering.

    Args:
        count: function that returns the current call counts of all models.
        log: function that writes a log line.
    """

    def __init__(self, count: Callable[[], Counts], log: Callable[[str], object]) -> None:
        self._count, self._log = count, log
        self._open: list[Request] = []
        self._lock = threading.Lock()

    def begin(self) -> Request:
        """Add a request and return it."""
        request = Request(self._count())
        with self._lock:
            self._open.append(request)
            for each in self._open:
                each.concurrent = max(each.concurrent, len(self._open))
        return request

    def end(self, request: Request) -> None:
        """Remove a request that has been answered or canceled."""
        with self._lock:
            self._open.remove(request)

    def answer(self, request: Request, context: GenerationContext, responses: Iterator[object]) -> Iterator[object]:
        """Yield the ``responses``, one per token. Log the request at the end, or when the client disconnects."""

        def logged() -> Iterator[object]:
            try:
                yield None  # start the generator now, so that `finally` runs even if no token is read
                for response in responses:
                    request.tokens += 1
                    yield response
            finally:
                self.end(request)
                self._log(describe(request, self._count(), len(context.prompt), context.prompt_cache_count))

        started = logged()
        next(started)
        return started


def describe(request: Request, now: Counts, prompt: int, cached: int) -> str:
    """Return the log line of a request.

    Args:
        now: call counts of all models at the end of the request.
        prompt: number of tokens in the prompt.
        cached: number of prompt tokens that the prompt cache contained.
    """
    from_cache = f" ({cached:,} cached)" if cached > 0 else ""
    others = f" of up to {request.concurrent} concurrent requests" if request.concurrent > 1 else ""
    calls = [f"{now.sparse_calls - request.before.sparse_calls:,} sparse"]
    if now.prefill is not None:
        calls.append(f"{now.prefill - request.before.prefill:,} sparse in prefill")
    dense = now.dense_calls - request.before.dense_calls
    calls.append(f"{dense.total():,} dense" + (f" ({listing(dense)})" if dense else ""))
    return f"prompt of {prompt:,} tokens{from_cache}, {request.tokens:,} generated; calls{others}: {', '.join(calls)}"


def changed_interface() -> str | None:
    """Return the first interface of mlx-lm's server that differs from the supported version, or None."""
    from mlx_lm import server

    generate = getattr(getattr(server, "ResponseGenerator", None), "generate", None)
    expected = ["self", "request", "generation_args", "progress_callback"]
    if not callable(generate) or list(inspect.signature(generate).parameters) != expected:
        return "ResponseGenerator.generate"
    named = getattr(getattr(server, "GenerationContext", None), "__annotations__", {})
    return None if {"prompt", "prompt_cache_count"} <= set(named) else "GenerationContext"


def stop(generator: ResponseGenerator, session: Session) -> None:
    """Stop the server. If its thread is busy with a request or a calibration, print the report and end the process."""
    generator._stop = True
    generator._generation_thread.join(SECONDS_TO_STOP)
    if generator._generation_thread.is_alive():
        session.print_report()
        with WRITING:
            os._exit(0)


@contextlib.contextmanager
def request_logging(session: Session) -> Iterator[None]:
    """Add log lines to mlx-lm's server. If its interfaces have changed, print a warning."""
    found = changed_interface()
    if found is not None:
        session.print_line(f"warning: no log lines: mlx-lm's {found} has changed. The report is printed at the end.")
        yield
        return
    from huggingface_hub.constants import HF_HUB_CACHE
    from mlx_lm import server

    requests = Requests(session.calls, session.log)
    with contextlib.suppress(OSError):
        Path(HF_HUB_CACHE).mkdir(parents=True, exist_ok=True)  # without the folder, /v1/models of mlx-lm fails
    generate = server.ResponseGenerator.generate

    def ours(generator: ResponseGenerator, *args: Any, **kwargs: Any) -> tuple[GenerationContext, Iterator[object]]:
        request = requests.begin()
        try:
            context, responses = generate(generator, *args, **kwargs)
        except BaseException:
            requests.end(request)
            raise
        return context, requests.answer(request, context, responses)

    replaced: list[tuple[str, Any, Any]] = [("generate", generate, ours)]
    if hasattr(server.ResponseGenerator, "stop_and_join"):
        original = server.ResponseGenerator.stop_and_join
        replaced.append(("stop_and_join", original, functools.partialmethod(stop, session)))
    if session.lossless is not None and hasattr(server.ResponseGenerator, "_is_batchable"):
        # Batches would decode densely, so the server takes one request at a time, as with a draft model.
        batchable = server.ResponseGenerator._is_batchable
        replaced.append(("_is_batchable", batchable, lambda generator, args: False))
    for name, _, own in replaced:
        setattr(server.ResponseGenerator, name, own)
    try:
        yield
    finally:
        for name, original, _ in replaced:
            setattr(server.ResponseGenerator, name, original)
