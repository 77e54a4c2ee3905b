"""What mlx-lm generates with: its `generate_step`, with drafts and checks, and the same tokens.

A token is accepted if the check samples it too: from the logits of dense attention, with the random numbers that dense
decoding would have drawn there. So it is the token of dense decoding, with any sampler, and a seed gives the same text.
Drafts are sampled with the same numbers, for which they agree more often than two free draws would.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import KVCache, make_prompt_cache
from mlx_lm.sample_utils import make_sampler

from ...api.call_report import Counts
from ...checks import ConfigError
from ...model_info import leaves
from ..dense import rows_at_once
from .figures import DraftFigures
from .pace import MOST, Pace, fused
from .phase import Phase, entered
from .undo import ROWS, Undo

if TYPE_CHECKING:
    from ..plan import Plan

NAME = "generate_step"
CLEAR_EVERY = 256  # tokens after which MLX's unused buffers are given back, as mlx-lm does

generate: Any = importlib.import_module("mlx_lm.generate")  # the package has a function of this name
original = generate.generate_step
PARAMETERS = set(inspect.signature(original).parameters)
greedy = make_sampler(0.0)


def generate_step(prompt: mx.array, model: Any, *stream: Any, **options: Any) -> Iterator[tuple[int, mx.array]]:
    """mlx-lm's function of this name; a model that is enabled losslessly drafts and checks."""
    state = getattr(model, "_mlx_sparse", None)
    if state is None or state[0].lossless is None:
        steps: Iterator[tuple[int, mx.array]] = original(prompt, model, *stream, **options)
        return steps
    return Run(state[0], model, *stream, **options).tokens(prompt)


_wraps: list[Callable[..., Any]] = []  # one for each lossless model


def wrap() -> None:
    """Let mlx-lm generate with `generate_step` until as many `unwrap` calls."""
    _wraps.append(generate_step)
    generate.generate_step = generate_step


def unwrap() -> None:
    """Undo one `wrap`. The last one restores mlx-lm's function."""
    _wraps.pop()
    if not _wraps:
        generate.generate_step = original


Sampled = tuple[mx.array, mx.array]  # a token (1,) and its log-probabilities (1, vocabulary)


@dataclass(frozen=True)
class Found:
    """What follows a token.

    Attributes:
        accepted: drafts, as the check sampled them.
        following: the token behind them, which no cache holds yet.
        settle: told how many tokens were given, of the one before and those that were accepted, makes caches and random
            state what they are after them.
    """

    accepted: list[Sampled]
    following: Sampled
    settle: Callable[[int], None]


class Run:
    """One answer. The arguments are those of mlx-lm's `generate_step`.

    Raises:
        ConfigError: the prompt is not of tokens, or the cache forgets keys.
    """

    def __init__(
        self,
        plan: Plan,
        model: Any,
        stream: Any = None,
        *,
        max_tokens: int = 256,
        sampler: Callable[[mx.array], mx.array] | None = None,
        logits_processors: list[Callable[[mx.array, mx.array], mx.array]] | None = None,
        max_kv_size: int | None = None,
        prompt_cache: list[Any] | None = None,
        prefill_step_size: int = 2048,
        kv_bits: int | None = None,
        kv_group_size: int = 64,
        quantized_kv_start: int = 5000,
        prompt_progress_callback: Callable[[int, int], object] | None = None,
        input_embeddings: mx.array | None = None,
    ) -> None:
        if input_embeddings is not None:
            raise ConfigError("lossless: expected a prompt of tokens, got embeddings. Use this model without it.")
        if max_kv_size is not None:
            raise ConfigError(f"lossless: expected a cache that keeps all keys, got max_kv_size={max_kv_size}.")
        self.plan, self.model = plan, model
        self.stream = generate.generation_stream if stream is None else stream
        self.most = max_tokens
        self.sampler = sampler or greedy
        self.processors = logits_processors or []
        self.cache = make_prompt_cache(model) if prompt_cache is None else prompt_cache
        if any(getattr(cache, "keep", 0) for cache in leaves(self.cache)):
            # Several queries in one call miss the first keys, which a step keeps.
            raise ConfigError("lossless: expected a cache that keeps all keys, got one of --max-kv-size (max_kv_size).")
        self.piece = prefill_step_size
        self.quantise = functools.partial(
            generate.maybe_quantize_kv_cache,
            self.cache,
            quantized_kv_start=quantized_kv_start,
            kv_group_size=kv_group_size,
            kv_bits=kv_bits,
        )
        self.quantises = kv_bits is not None
        self.progress = prompt_progress_callback or (lambda done, all: None)
        self.pace = Pace(plan.lossless or None, self._longest())
        self.history: mx.array | None = None  # tokens that the caches hold, for processors
        self.length = 0  # and how many they are

    def _longest(self) -> int:
        """Drafts for one check that may pay: on a GPU those that all layers check at once."""
        if mx.default_device().type != mx.gpu:
            return MOST
        found = [MOST]
        for step in {layer.step for _, layer in self.plan.layers}:
            packed = self.quantises or step.packed is not None
            found.append(fused(step.G, rows_at_once(self.plan.backend, step.D, packed=packed)))
        return min(found)

    def tokens(self, prompt: mx.array) -> Iterator[tuple[int, mx.array]]:
        """Tokens with their log-probabilities ``(vocabulary,)``.

        However it ends, the caches then hold the prompt and the tokens that were given, and the random state is what
        it would be after dense decoding.
        """
        if len(prompt) == 0:
            raise ConfigError("prompt: expected at least one token, got none.")
        with mx.stream(self.stream):
            y, logprobs = self._prompt(prompt)
        if self.most == 0:
            mx.eval(y)
            self.progress(len(prompt), len(prompt))
            return
        given, python_ends = 0, sys.is_finalizing  # by names of its own: modules lose theirs then
        while True:
            with mx.stream(self.stream), entered(Phase.CHECK):
                turn = self.pace.turn(self._room(given))
                if turn.drafts:
                    found = self._check(y, turn.drafts, timed=turn.timed)
                else:
                    found = self._step(y, timed=turn.timed)
            kept = 0
            try:
                if given == 0:
                    mx.eval(y)
                    self.progress(len(prompt), len(prompt))
                for token, of_token in [(y, logprobs), *found.accepted]:
                    kept += 1
                    given += 1
                    yield int(token), of_token.squeeze(0)
                    if given == self.most:
                        return
            finally:
                if not python_ends():
                    with mx.stream(self.stream), entered(Phase.CHECK):
                        found.settle(max(kept, 1))  # dense decoding takes the step behind a token before it gives it
            y, logprobs = found.following
            if given % CLEAR_EVERY < kept:
                mx.clear_cache()

    def _prompt(self, prompt: mx.array) -> Sampled:
        """The first token, in the pieces and with the reports of mlx-lm."""
        whole = len(prompt)
        self.progress(0, whole)
        while len(prompt) > 1:
            piece, prompt = mx.split(prompt, [min(self.piece, len(prompt) - 1)])
            self.model(piece[None], cache=self.cache)
            self.quantise()
            mx.eval([cache.state for cache in self.cache])
            self._hold([piece])
            self.progress(self.length, whole)
            mx.clear_cache()
        with entered(Phase.CHECK):
            found = self._sample(self._last(prompt), [prompt])
        self._hold([prompt])
        mx.async_eval(*found)  # type: ignore[no-untyped-call]
        self.length = max((cache.offset for cache in leaves(self.cache) if isinstance(cache, ROWS)), default=0)
        return found

    def _room(self, given: int) -> int:
        """Drafts that may be of use: none where they would not be sparse, or would be written in more bits."""
        left = self.most - given - 1 if self.most >= 0 else self.length
        if self.quantises and any(isinstance(cache, KVCache) for cache in leaves(self.cache)):
            return 0
        return left if self.length + 1 >= self.plan.sparse_from() else 0

    def _step(self, y: mx.array, *, timed: bool) -> Found:
        """A dense step; the device computes it while the token before is used."""
        if timed:
            mx.eval(y)
        began = time.perf_counter()
        following = self._sample(self._last(y), [y])
        (mx.eval if timed else mx.async_eval)(*following)
        seconds = time.perf_counter() - began if timed else None
        self.pace.note_step(seconds)
        figures = DraftFigures(alone=1, alone_seconds=seconds or 0.0, timed_alone=int(timed))
        self.plan.report.add(Counts(drafts=figures))
        return Found([], following, lambda kept: self._hold([y]))

    def _check(self, y: mx.array, n: int, *, timed: bool) -> Found:
        """``n`` drafts, and what dense attention says of them."""
        undo = Undo(self.cache)
        random = Random(self.sampler is not greedy or bool(self.processors))  # which may draw too
        inputs = [y]
        if timed:
            mx.eval(y)
        times = [time.perf_counter()]
        try:
            with entered(Phase.DRAFT):
                for _ in range(n):
                    inputs.append(self._sample(self._last(inputs[-1]), inputs)[0])
            if timed:
                mx.eval(inputs)
                times.append(time.perf_counter())
            undo.back()
            random.back()
            logits = self.model(mx.concatenate(inputs)[None], cache=self.cache)
            sampled = []
            for row in range(n + 1):
                sampled.append(self._sample(logits[:, row], inputs[: row + 1]))
                random.note()
            mx.eval(inputs, sampled, random.noted)
        except BaseException:
            undo.back()
            random.back()
            raise
        times.append(time.perf_counter())
        same = [int(draft) == int(token) for draft, (token, _) in zip(inputs[1:], sampled, strict=False)]
        accepted = same.index(False) if False in same else n
        seconds = (times[1] - times[0], times[2] - times[1]) if timed else None
        self._count(n, accepted, seconds)

        def settle(kept: int) -> None:
            if undo.trims:
                undo.back(kept)
            else:
                if kept <= n:
                    undo.back()
                    self.model(mx.concatenate(inputs[:kept])[None], cache=self.cache)
                # Now: another thread, which may go on from here, could not.
                mx.async_eval([cache.state for cache in self.cache])  # type: ignore[no-untyped-call]
            random.go_on(kept - 1)
            self._hold(inputs[:kept])

        return Found(sampled[:accepted], sampled[accepted], settle)

    def _count(self, n: int, accepted: int, seconds: tuple[float, float] | None) -> None:
        """Tell the pace and the report of a check."""
        pauses = self.pace.pauses
        self.pace.note_check(n, accepted, seconds)
        drafting, checking = seconds or (0.0, 0.0)
        figures = DraftFigures(
            checks=1,
            examined=(1,) * min(accepted + 1, n),
            accepted=(1,) * accepted + (0,) * (accepted < n),
            drafted=n,
            draft_seconds=drafting,
            check_seconds=checking,
            timed=int(seconds is not None),
            pauses=self.pace.pauses - pauses,
        )
        self.plan.report.add(Counts(drafts=figures))

    def _last(self, tokens: mx.array) -> mx.array:
        """The logits ``(1, vocabulary)`` behind ``tokens``, which the caches then hold."""
        logits: mx.array = self.model(tokens[None], cache=self.cache)[:, -1]
        return logits

    def _sample(self, logits: mx.array, inputs: list[mx.array]) -> Sampled:
        """The token behind those that the caches held and ``inputs``."""
        if self.processors:
            held = [] if self.history is None else [self.history]
            tokens = mx.concatenate([*held, *inputs])
            for processor in self.processors:
                logits = processor(tokens, logits)
        self.quantise()
        logprobs = logits - mx.logsumexp(logits, keepdims=True)
        return self.sampler(logprobs), logprobs

    def _hold(self, tokens: list[mx.array]) -> None:
        """The caches hold these tokens too."""
        self.length += sum(len(part) for part in tokens)
        if self.processors:
            self.history = mx.concatenate([*([] if self.history is None else [self.history]), *tokens])


class Random:
    """MLX's random state, which samplers draw from.

    Args:
        drawn: whether anything is drawn.
    """

    def __init__(self, drawn: bool) -> None:
        self._drawn = drawn
        self.noted: list[mx.array] = []
        self._start = self._now() if drawn else None

    def _now(self) -> mx.array:
        key: mx.array = mx.random.state[0]  # type: ignore[index]
        return key[...]

    def back(self) -> None:
        """Draw again what was drawn since this was made."""
        self._set(self._start)

    def note(self) -> None:
        """This is a place where `go_on` goes to."""
        if self._drawn:
            self.noted.append(self._now())

    def go_on(self, place: int) -> None:
        """Draw next what would be drawn at this place."""
        self._set(self.noted[place] if self._drawn else None)

    def _set(self, key: mx.array | None) -> None:
        if key is not None:
            high, low = np.array(key).tolist()
            mx.random.seed(high << 32 | low)  # a key is its seed in two halves
