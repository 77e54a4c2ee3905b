"""Replace mlx-lm's `generate_step` with self-speculative decoding, which generates the same tokens.

A check samples tokens from the logits of dense attention, with the random numbers that dense decoding would use. A
draft token is accepted if it equals the sampled token. So dense decoding generates the same tokens, for every sampler
and seed. Draft tokens are sampled with the same random numbers, which increases the acceptance rate.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import inspect
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import mlx.core as mx
from mlx import nn
from mlx_lm.models.cache import KVCache, make_prompt_cache
from mlx_lm.sample_utils import make_sampler

from ...api.call_report import Counts
from ...checks import BackendUnavailable, ConfigError
from ...core.base import Method, Prefill
from ...model_info import leaves
from ...model_parts import part_of
from ..call import Phase, in_phase
from ..dense import drafts_per_kernel, rows_at_once
from ..statistics import DraftStatistics
from .draft_length import MAX_DRAFTS, DraftLength
from .rewind import ROWS, Checked, Random, Undo

if TYPE_CHECKING:
    from ..plan import Plan

# Model families whose masks in mlx-lm differ between one call with several queries and several calls with one query.
UNEVEN = frozenset({"phi3small", "plamo3"})
CLEAR_EVERY = 256  # tokens between calls of mx.clear_cache, as in mlx-lm

generate: Any = importlib.import_module("mlx_lm.generate")  # the package has a function of this name
original = generate.generate_step
PARAMETERS = set(inspect.signature(original).parameters)
greedy = make_sampler(0.0)


def generate_step(prompt: mx.array, model: nn.Module, *stream: Any, **options: Any) -> Iterator[tuple[int, mx.array]]:
    """Generate tokens by self-speculative decoding. If the model is not ``lossless``, call mlx-lm's `generate_step`."""
    state = getattr(model, "_mlx_sparse", None)
    if state is None or state[0].lossless is None:
        steps: Iterator[tuple[int, mx.array]] = original(prompt, model, *stream, **options)
        return steps
    return Run(state[0], model, Options(*stream, **options)).tokens(prompt)


_wraps: list[Callable[..., object]] = []  # one entry for each lossless model


def wrap() -> Callable[[], None]:
    """Replace mlx-lm's `generate_step`, and return a function that undoes this call.

    mlx-lm's function is restored once every call to `wrap` has been undone.
    """
    _wraps.append(generate_step)
    generate.generate_step = generate_step

    def unwrap() -> None:
        _wraps.pop()
        if not _wraps:
            generate.generate_step = original

    return unwrap


Sampled = tuple[mx.array, mx.array]  # token (1,) and log-probabilities (1, vocabulary)


@dataclass(frozen=True)
class Result:
    """Result of a check, or of a dense decode step.

    Attributes:
        accepted: accepted draft tokens with the log-probabilities of dense attention; empty after a dense decode step.
        following: next token after the accepted draft tokens, which is not in the caches yet.
        keep: function that is called before each token is yielded. The argument counts the tokens to keep in the
            caches: 1 for the token before the draft tokens. ``keep`` sets the random state of dense decoding.
    """

    accepted: list[Sampled]
    following: Sampled
    keep: Callable[[int], None]


@dataclass(frozen=True)
class Options:
    """Options of mlx-lm's `generate_step`, with its defaults. If ``stream`` is None, use mlx-lm's stream."""

    stream: mx.Stream | None = None
    max_tokens: int = 256
    sampler: Callable[[mx.array], mx.array] | None = None
    logits_processors: Sequence[Callable[[mx.array, mx.array], mx.array]] | None = None
    max_kv_size: int | None = None
    prompt_cache: list[Any] | None = None
    prefill_step_size: int = 2048
    kv_bits: int | None = None
    kv_group_size: int = 64
    quantized_kv_start: int = 5000
    prompt_progress_callback: Callable[[int, int], object] | None = None
    input_embeddings: mx.array | None = None


class Run:
    """Self-speculative generation for one prompt.

    Raises:
        ConfigError: the prompt consists of embeddings, or the cache does not store all keys.
    """

    def __init__(self, plan: Plan, model: nn.Module, options: Options) -> None:
        if options.input_embeddings is not None:
            raise ConfigError("lossless: expected a prompt of tokens, got embeddings. Run without lossless.")
        if options.max_kv_size is not None:
            size = options.max_kv_size
            raise ConfigError(f"lossless: expected a cache that stores all keys, got max_kv_size={size}.")
        self.plan, self.model = plan, model
        self.stream = generate.generation_stream if options.stream is None else options.stream
        self.max_tokens = options.max_tokens
        self.sampler = options.sampler or greedy
        self.processors = options.logits_processors or []
        self.cache = make_prompt_cache(model) if options.prompt_cache is None else options.prompt_cache
        if any(getattr(cache, "keep", 0) for cache in leaves(self.cache)):
            # In such a cache, several queries in one call would not attend to the first keys, but a single query would.
            raise ConfigError("lossless: expected a cache that stores all keys, got a rotating one (--max-kv-size).")
        self.chunk = options.prefill_step_size
        self.quantize = functools.partial(
            generate.maybe_quantize_kv_cache,
            self.cache,
            quantized_kv_start=options.quantized_kv_start,
            kv_group_size=options.kv_group_size,
            kv_bits=options.kv_bits,
        )
        self.quantizes = options.kv_bits is not None
        self.progress = options.prompt_progress_callback or (lambda done, all: None)
        self.draft_length = DraftLength(plan.lossless or None, self._longest_draft())
        self.history: mx.array | None = None  # tokens in the caches, for logits processors
        self.length = 0  # number of tokens in the caches

    def _longest_draft(self) -> int:
        """Return the largest draft length. On a GPU, one kernel per layer must be able to check all draft tokens."""
        if mx.default_device().type != mx.gpu:
            return MAX_DRAFTS
        found = [MAX_DRAFTS]
        for step in {layer.step for _, layer in self.plan.layers}:
            packed = self.quantizes or step.packed is not None
            found.append(drafts_per_kernel(step.G, rows_at_once(self.plan.backend, step.D, packed=packed)))
        return min(found)

    def tokens(self, prompt: mx.array) -> Iterator[tuple[int, mx.array]]:
        """Yield each generated token with its log-probabilities ``(vocabulary,)``.

        At each yield, the caches and the random state are the same as after dense decoding of the yielded tokens. So a
        caller can stop at any token, and the generator needs no cleanup.
        """
        if len(prompt) == 0:
            raise ConfigError("prompt: expected at least one token, got none.")
        with mx.stream(self.stream):
            y, logprobs = self._prompt(prompt)
        if self.max_tokens == 0:
            mx.eval(y)
            self.progress(len(prompt), len(prompt))
            return
        yielded = 0
        while True:
            with mx.stream(self.stream), in_phase(Phase.CHECK):
                planned = self.draft_length.next_draft(self._useful_drafts(yielded))
                if planned.drafts:
                    found = self._check(y, planned.drafts, timed=planned.timed)
                else:
                    found = self._step(y, timed=planned.timed)
            tokens = [(y, logprobs), *found.accepted]
            for count, (token, token_logprobs) in enumerate(tokens, 1):
                with mx.stream(self.stream), in_phase(Phase.CHECK):
                    found.keep(count)  # mlx-lm also processes a token before it yields the token
                if yielded == 0:
                    mx.eval(y)
                    self.progress(len(prompt), len(prompt))
                yielded += 1
                yield int(token), token_logprobs.squeeze(0)
                if yielded == self.max_tokens:
                    return
            self._count_tokens([token for token, _ in tokens])
            y, logprobs = found.following
            if yielded % CLEAR_EVERY < len(tokens):
                mx.clear_cache()

    def _prompt(self, prompt: mx.array) -> Sampled:
        """Run prefill in the same chunks as mlx-lm, report progress, and sample the first token."""
        total = len(prompt)
        self.progress(0, total)
        while len(prompt) > 1:
            chunk, prompt = mx.split(prompt, [min(self.chunk, len(prompt) - 1)])
            self.model(chunk[None], cache=self.cache)
            self.quantize()
            mx.eval([cache.state for cache in self.cache])
            self._count_tokens([chunk])
            self.progress(self.length, total)
            mx.clear_cache()
        with in_phase(Phase.CHECK):
            found = self._sample(self._last(prompt), [prompt])
        self._count_tokens([prompt])
        mx.async_eval(*found)  # type: ignore[no-untyped-call]
        self.length = max((cache.offset for cache in leaves(self.cache) if isinstance(cache, ROWS)), default=0)
        return found

    def _useful_drafts(self, yielded: int) -> int:
        """Return the largest useful draft length; 0 if drafting would be dense or a cache is not quantized yet."""
        left = self.max_tokens - yielded - 1 if self.max_tokens >= 0 else self.length
        if self.quantizes and any(isinstance(cache, KVCache) for cache in leaves(self.cache)):
            return 0
        return left if self.length + 1 >= self.plan.sparse_from() else 0

    def _step(self, y: mx.array, *, timed: bool) -> Result:
        """Start a dense decode step for token ``y``. If ``timed`` is True, wait for the result."""
        if timed:
            mx.eval(y)
        began = time.perf_counter()
        following = self._sample(self._last(y), [y])
        (mx.eval if timed else mx.async_eval)(*following)
        seconds = time.perf_counter() - began if timed else None
        self.draft_length.note_step(seconds)
        statistics = DraftStatistics(alone=1, alone_seconds=seconds or 0.0, timed_alone=int(timed))
        self.plan.report.add(Counts(drafts=statistics))
        return Result([], following, lambda count: None)

    def _check(self, y: mx.array, n: int, *, timed: bool) -> Result:
        """Draft ``n`` tokens after token ``y``, and check all ``n`` tokens with one dense call."""
        undo = Undo(self.cache)
        random = Random(self.sampler is not greedy or bool(self.processors))  # processors may draw numbers too
        inputs = [y]
        if timed:
            mx.eval(y)
        times = [time.perf_counter()]
        try:
            with in_phase(Phase.DRAFT):
                for _ in range(n):
                    inputs.append(self._sample(self._last(inputs[-1]), inputs)[0])
            if timed:
                mx.eval(inputs)
                times.append(time.perf_counter())
            undo.restore()
            random.restore()
            logits = self.model(mx.concatenate(inputs)[None], cache=self.cache)
            sampled = []
            for row in range(n + 1):
                sampled.append(self._sample(logits[:, row], inputs[: row + 1]))
                random.note()
            mx.eval(inputs, sampled, random.noted)
        except BaseException:
            undo.restore()
            random.restore()
            raise
        times.append(time.perf_counter())
        same = [int(draft) == int(token) for draft, (token, _) in zip(inputs[1:], sampled, strict=False)]
        accepted = same.index(False) if False in same else n
        seconds = (times[1] - times[0], times[2] - times[1]) if timed else None
        self._count(n, accepted, seconds)

        checked = Checked(undo, self.cache, mx.concatenate(inputs), accepted + 1, self.model)

        def keep(count: int) -> None:
            checked.keep(count)
            random.resume(count - 1)

        return Result(sampled[:accepted], sampled[accepted], keep)

    def _count(self, n: int, accepted: int, seconds: tuple[float, float] | None) -> None:
        """Record in the report and in ``draft_length`` that a check accepted ``accepted`` of ``n`` draft tokens."""
        pauses = self.draft_length.pauses
        self.draft_length.note_check(n, accepted, seconds)
        drafting, checking = seconds or (0.0, 0.0)
        statistics = DraftStatistics(
            checks=1,
            examined=(1,) * min(accepted + 1, n),
            accepted=(1,) * accepted + (0,) * (accepted < n),
            drafted=n,
            draft_seconds=drafting,
            check_seconds=checking,
            timed=int(seconds is not None),
            pauses=self.draft_length.pauses - pauses,
        )
        self.plan.report.add(Counts(drafts=statistics))

    def _last(self, tokens: mx.array) -> mx.array:
        """Run the model on ``tokens``, and return the logits ``(1, vocabulary)`` after the last token."""
        logits: mx.array = self.model(tokens[None], cache=self.cache)[:, -1]
        return logits

    def _sample(self, logits: mx.array, inputs: list[mx.array]) -> Sampled:
        """Sample a token from ``logits``. ``inputs`` are the preceding tokens that are not in ``history`` yet."""
        if self.processors:
            before = [] if self.history is None else [self.history]
            tokens = mx.concatenate([*before, *inputs])
            for processor in self.processors:
                logits = processor(tokens, logits)
        self.quantize()
        logprobs = logits - mx.logsumexp(logits, keepdims=True)
        return self.sampler(logprobs), logprobs

    def _count_tokens(self, tokens: list[mx.array]) -> None:
        """Add ``tokens``, which are now in the caches, to ``length`` and ``history``."""
        self.length += sum(len(part) for part in tokens)
        if self.processors:
            self.history = mx.concatenate([*([] if self.history is None else [self.history]), *tokens])


def check_drafts(prefill: Prefill | None, decode: Method | None, draft_tokens: int | None) -> None:
    """Raise `ConfigError` if the methods cannot draft tokens, or if ``draft_tokens`` is out of range."""
    if draft_tokens is not None and not 1 <= draft_tokens <= MAX_DRAFTS:
        raise ConfigError(f"lossless: expected 1 to {MAX_DRAFTS} drafts for each check, got {draft_tokens}.")
    if prefill is not None:
        raise ConfigError(f"lossless: expected a decode method only, got {prefill.name}, which makes prefill sparse.")
    if decode is None or decode.observes_prefill:
        name = "none" if decode is None else f"{decode.name}, which cannot remove rejected drafts"
        raise ConfigError(f"lossless: expected a decode method that can draft, got {name}.")


def check_options(args: argparse.Namespace, command: str, *, generates: bool) -> None:
    """Raise `ConfigError` if the command or one of its options is not supported with ``--lossless``."""
    if not generates:
        raise ConfigError(f"--lossless: expected a command that generates from one prompt, got {command}.")
    for name in ("draft_model", "max_kv_size"):
        if getattr(args, name, None) is not None:
            raise ConfigError(f"--lossless: expected no --{name.replace('_', '-')}, got both options. Drop one option.")
    if getattr(args, "batch_size", 1) > 1:
        raise ConfigError(f"--lossless: expected one sequence at a time, got --batch-size {args.batch_size}.")


def make_lossless(plan: Plan, model: nn.Module, draft_tokens: int | None) -> None:
    """Configure a `Plan` for self-speculative decoding, in which the decode method drafts tokens.

    Raises:
        ConfigError: the method or the model cannot draft tokens, or this process has only a part of the model.
        BackendUnavailable: mlx-lm's `generate_step` has no parameter of a required name.
    """
    check_drafts(plan.prefill, plan.decode, draft_tokens)
    if not part_of(model).whole:
        raise ConfigError("lossless: expected a whole model on one process, got a part of a model. Disable lossless.")
    if plan.report.model_type in UNEVEN:
        family = plan.report.model_type
        raise ConfigError(f"lossless: expected a model with equal masks for one and for several tokens, got {family}.")
    missing = {"prompt", "model", "prompt_cache", "sampler", "logits_processors"} - PARAMETERS
    if missing:
        raise BackendUnavailable(
            f"mlx-lm: expected generate_step with the parameters {', '.join(sorted(missing))}, got none of that name."
        )
    plan.lossless = draft_tokens or 0
