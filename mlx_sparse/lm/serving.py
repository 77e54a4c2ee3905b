"""What `mlx_lm.server` tells of sparse attention: a line in its log for each request, and ``GET /v1/sparse``.

The server answers each connection on a thread of its own, and one more thread runs the model for all of them, so that
a call of the model may be of several requests. A request's line counts the calls that were made while it was there.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..api.call_report import Counts, listing

if TYPE_CHECKING:
    from .command import Session

PATH = "/v1/sparse"


@dataclass(eq=False)
class Request:
    """A request that is not answered yet.

    Attributes:
        before: the calls when it came, of all models.
        together: requests that were there at the same time, at most; itself included.
        tokens: of its answer so far.
    """

    before: Counts
    together: int = 1
    tokens: int = 0


class Requests:
    """The requests that are not answered yet.

    Args:
        count: tells the calls so far, of all models.
        say: is told a line for each request.
    """

    def __init__(self, count: Callable[[], Counts], say: Callable[[str], object]) -> None:
        self._count, self._say = count, say
        self._open: list[Request] = []
        self._lock = threading.Lock()

    def begin(self) -> Request:
        """A request has come."""
        request = Request(self._count())
        with self._lock:
            self._open.append(request)
            for each in self._open:
                each.together = max(each.together, len(self._open))
        return request

    def end(self, request: Request) -> None:
        """It is answered, or given up."""
        with self._lock:
            self._open.remove(request)

    def answer(self, request: Request, context: Any, responses: Iterator[Any]) -> Iterator[Any]:
        """``responses``, one for each token; afterwards the request's line is said, even if the client has gone."""

        def listened() -> Iterator[Any]:
            try:
                yield  # from here on it ends below, whether anybody asks for a token or not
                for response in responses:
                    request.tokens += 1
                    yield response
            finally:
                self.end(request)
                self._say(describe(request, self._count(), len(context.prompt), context.prompt_cache_count))

        begun = listened()
        next(begun)
        return begun


def describe(request: Request, now: Counts, prompt: int, cached: int) -> str:
    """The line of a request: a prompt of so many tokens, of which some were in the server's prompt cache."""
    known = f" ({cached:,} cached)" if cached > 0 else ""
    others = f" meanwhile, of up to {request.together} requests at a time" if request.together > 1 else ""
    calls = [f"{now.sparse_calls - request.before.sparse_calls:,} sparse"]
    if now.prefill is not None:
        calls.append(f"{now.prefill - request.before.prefill:,} sparse for prompts")
    dense = now.dense_calls - request.before.dense_calls
    calls.append(f"{dense.total():,} dense" + (f" ({listing(dense)})" if dense else ""))
    return f"prompt of {prompt:,} tokens{known}, {request.tokens:,} answered; calls{others}: {', '.join(calls)}"


def moved() -> str | None:
    """What of mlx-lm's server is not as expected; None if all of it is."""
    from mlx_lm import server

    expected = {
        "APIHandler.do_GET": ["self"],
        "APIHandler._set_completion_headers": ["self", "status_code"],
        "ResponseGenerator.generate": ["self", "request", "generation_args", "progress_callback"],
    }
    for name, parameters in expected.items():
        owner, _, attribute = name.partition(".")
        found = getattr(getattr(server, owner, None), attribute, None)
        if not callable(found) or list(inspect.signature(found).parameters) != parameters:
            return name
    named = getattr(getattr(server, "GenerationContext", None), "__annotations__", {})
    return None if {"prompt", "prompt_cache_count"} <= set(named) else "GenerationContext"


@contextlib.contextmanager
def shown(session: Session) -> Iterator[None]:
    """Let mlx-lm's server tell of the session's reports meanwhile; if it has moved, say that it does not."""
    found = moved()
    if found is not None:
        session.say(f"no lines for requests and no {PATH}: mlx-lm's {found} has moved. The report follows at the end.")
        yield
        return
    from mlx_lm import server

    handler_class: Any = server.APIHandler
    requests = Requests(session.calls, session.log)
    generate, get = server.ResponseGenerator.generate, handler_class.do_GET

    def ours(generator: Any, *args: Any, **kwargs: Any) -> Any:
        request = requests.begin()
        try:
            context, responses = generate(generator, *args, **kwargs)
        except BaseException:
            requests.end(request)
            raise
        return context, requests.answer(request, context, responses)

    def do_GET(handler: Any) -> None:
        if handler.path.partition("?")[0] != PATH:
            get(handler)
            return
        body = json.dumps(session.as_dict()).encode()
        handler._set_completion_headers(200)
        handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        handler.wfile.write(body)

    places: list[tuple[Any, str, Any, Any]] = [
        (server.ResponseGenerator, "generate", generate, ours),
        (handler_class, "do_GET", get, do_GET),
    ]
    if session.lossless is not None and hasattr(server.ResponseGenerator, "_is_batchable"):
        # Batches would decode densely: one request at a time, as with a draft model.
        batchable = server.ResponseGenerator._is_batchable
        places.append((server.ResponseGenerator, "_is_batchable", batchable, lambda generator, args: False))
    for place, name, _, own in places:
        setattr(place, name, own)
    try:
        yield
    finally:
        for place, name, original, _ in places:
            setattr(place, name, original)
