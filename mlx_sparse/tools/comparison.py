"""Prefill a long prompt once, and decode from the same prompt cache with plain dense, native dense and sparse steps."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import mlx.core as mx
from mlx_lm import stream_generate
from mlx_lm.models.cache import load_prompt_cache, make_prompt_cache, save_prompt_cache
from mlx_lm.sample_utils import make_sampler
from rich.console import Console

from ..calibrate import Calibration, describe
from ..checks import ConfigError
from ..core import registry
from ..core.base import Method
from ..core.decide import NEVER
from ..lm.model import native_dense, plan_of, sparse
from ..model_info import config_of
from .evaluate.tasks import encode
from .progress import Bar, stage
from .verdict import TEXT, is_safe

if TYPE_CHECKING:
    from mlx import nn
    from mlx_lm.tokenizer_utils import TokenizerWrapper as Tokenizer

PREFILL_CHUNK = 512  # tokens of a prefill chunk in `compare`; small, so that the progress bar also moves on a CPU
TURNS = 3  # number of runs of each kind, which alternate; the steps of all runs count
LEAST = 8192  # tokens of a prompt without a given length, or more if the crossover length is long
NATIVE = "native dense"
Update = Callable[[int], object]  # called with a number of tokens, after they are processed


@dataclass(frozen=True)
class Prompt:
    """Tokens of a chat prompt with a long document.

    Attributes:
        document: tokens of the chat template's start and of the document. If the context is too short, the last of
            these tokens are cut.
        end: tokens of the question and of the chat template's end.
    """

    document: list[int]
    end: list[int]

    @property
    def length(self) -> int:
        return len(self.document) + len(self.end)


@dataclass(frozen=True)
class Length:
    """Requested length of a prompt.

    Attributes:
        context: number of tokens. If None, the prompt has ``margin`` times the crossover length, and at least `LEAST`.
        seconds: longest time of the prefill in seconds, which may shorten the prompt.
    """

    context: int | None
    margin: int
    seconds: float


def encode_prompt(tokenizer: Tokenizer, document: str, end: str) -> Prompt:
    """Encode ``document`` and ``end`` as one user message. If the model has a chat template, apply the template."""
    before = after = ""
    if tokenizer.chat_template is not None:
        message = [{"role": "user", "content": "DOCUMENT"}]
        text = tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=False)
        before, _, after = text.partition("DOCUMENT")
    # Suppress the warning of transformers about long texts, because the text is cut later.
    logging.getLogger("transformers").setLevel(logging.ERROR)
    opening = encode(tokenizer, before) if before else tokenizer.encode("")
    return Prompt([*opening, *encode(tokenizer, document)], encode(tokenizer, end + after))


@dataclass(frozen=True)
class Decoded:
    """An answer that was decoded from a saved prompt cache.

    Attributes:
        first: time to the first token in seconds, without the prefill.
        steps: time of each later decode step in seconds. The first sparse step also builds the auxiliary cache state.
        peak_memory: peak memory in bytes, as reported by MLX.
    """

    text: str
    tokens: list[int]
    first: float
    steps: list[float]
    peak_memory: int

    @property
    def tokens_per_second(self) -> float:
        """Decode speed in tokens per second, from the median time of a step. The first step is excluded."""
        return 1 / median(self.steps[1:] or self.steps)


@dataclass(frozen=True)
class Comparison:
    """Results of decoding the same prompt with dense and with sparse attention.

    Attributes:
        crossover: largest crossover length in keys; `NEVER` if sparse attention is not faster at any length.
        limit: what limited ``context``: the "time" of the prefill, the "text", the context length of the "model", or ""
            if the prompt has the intended length.
        native: answer with dense attention on native kernels; None if they cannot run.
        kl: mean Kullback-Leibler divergence in nats of the sparse predictions from the dense predictions, over the
            `compared` tokens.
        report: result of `Report.as_dict` for the last sparse run, with the numbers of attention calls and bytes.
    """

    attn: str
    crossovers: list[str]
    crossover: int
    context: int
    limit: str
    prefill_seconds: float
    dense: Decoded
    native: Decoded | None
    sparse: Decoded
    kl: float
    report: dict[str, Any]

    @property
    def speeds(self) -> dict[str, float]:
        """Decode speeds in tokens per second. "dense" is the unmodified model."""
        answers = {"dense": self.dense, NATIVE: self.native, "sparse": self.sparse}
        return {name: answer.tokens_per_second for name, answer in answers.items() if answer is not None}

    @property
    def speedup(self) -> float:
        return self.speeds["sparse"] / self.speeds["dense"]

    @property
    def same_tokens(self) -> int:
        """Number of tokens before the first difference between the dense and the sparse answer."""
        pairs = list(zip(self.dense.tokens, self.sparse.tokens, strict=False))
        return next((i for i, (dense, sparse) in enumerate(pairs) if dense != sparse), len(pairs))

    @property
    def compared(self) -> int:
        """Number of tokens that both answers predict from the same text: up to the first different token."""
        return min(self.same_tokens + 1, len(self.dense.tokens), len(self.sparse.tokens))

    @property
    def safe(self) -> bool:
        """True if the sparse predictions are within the limits of `is_safe`, or if no step was sparse."""
        agreement = min(self.same_tokens, self.compared) / self.compared
        return not self.report["sparse_calls"] or is_safe(self.kl, agreement, self.compared, TEXT)

    @property
    def identical(self) -> bool:
        return self.dense.tokens == self.sparse.tokens

    def bytes_per_token(self, kind: str) -> float | None:
        """Return the bytes of K and V that ``kind`` attention ("dense" or "sparse") moves per token in a sparse run.

        If no step was sparse, return None.
        """
        calls = self.report["sparse_calls"]
        return self.report[f"{kind}_bytes"] / calls * self.report["served_layers"] if calls else None

    def as_dict(self) -> dict[str, object]:
        return (
            asdict(self)
            | {name: getattr(self, name) for name in ("speedup", "same_tokens", "identical")}
            | {"tokens_per_second": self.speeds}
        )


def compare(
    model: nn.Module,
    tokenizer: Tokenizer,
    prompt: Prompt,
    config: Method,
    length: Length,
    *,
    max_tokens: int,
    calibration: Calibration,
    console: Console,
) -> Comparison:
    """Prefill a prompt once, and decode densely and sparsely from the saved prompt cache.

    The prompt is shorter than ``length`` if the document, the model or the time limits its length.

    Args:
        model, tokenizer: a loaded model and its tokenizer. `enable` was not called on the model.
    """
    attn = str(config)
    with stage(console, f"finding the crossover length of {attn}"):
        crossovers, crossover = measure_crossover(model, config, calibration)
    known = config_of(model).get("max_position_embeddings")
    longest = min(prompt.length, known - max_tokens if isinstance(known, int) else NEVER)
    target = min(length.context or max(length.margin * crossover, LEAST), longest)
    limit = "" if target < longest else "text" if target == prompt.length else "model"
    if target <= len(prompt.end):
        fewest = len(prompt.end) + 1
        raise ConfigError(f"--context: expected at least {fewest:,} tokens for the question, got {target:,}.")
    tokens = prompt.document[: target - len(prompt.end)]
    cache, last = make_prompt_cache(model), prompt.end[-1:]
    start = time.perf_counter()
    with Bar("prefill", target - 1, "tokens", console) as progress, native_dense(model):
        done = prefill(model, cache, tokens, length.seconds, progress.update, later=len(prompt.end))
        prefill(model, cache, prompt.end[:-1], math.inf, progress.update)
    took = time.perf_counter() - start
    reached = done + len(prompt.end)
    limit = "time" if reached < target else limit
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "prompt.safetensors")
        save_prompt_cache(path, cache)
        del cache
        answers: list[Decoded] = []
        logprobs: dict[str, list[mx.array]] = {}
        names = ["dense", attn] if registry.unavailable("cpu") else ["dense", NATIVE, attn]
        runs = names * TURNS
        with Bar("answers", len(runs) * max_tokens, "tokens", console) as progress:
            for name in runs:
                ways: dict[str, Any] = {"dense": contextlib.nullcontext(), NATIVE: native_dense(model)}
                ways[attn] = sparse(model, config, calibration=calibration)
                with ways[name] as report:
                    saved = load_prompt_cache(path)
                    found, logprobs[name] = decode(model, tokenizer, saved, last, max_tokens, progress.update)
                    answers.append(found)
        for i, first in enumerate(answers[: len(names)]):
            later = [step for answer in answers[i :: len(names)] for step in answer.steps[1:]]
            answers[i] = dataclasses.replace(first, steps=[first.steps[0], *later])
    of = dict(zip(names, answers, strict=False))
    facts = (attn, crossovers, crossover, reached, limit, took, of["dense"], of.get(NATIVE), of[attn])
    made = Comparison(*facts, math.nan, report.as_dict())
    dense, ours = (mx.stack(logprobs[name][: made.compared]) for name in ("dense", attn))
    return dataclasses.replace(made, kl=float((mx.exp(dense) * (dense - ours)).sum(axis=-1).mean()))


def measure_crossover(model: nn.Module, attn: Method | str, calibration: Calibration) -> tuple[list[str], int]:
    """Return a description of each crossover length of the layers, and the largest crossover length in keys.

    If ``calibration.measures`` is True, measure unknown crossover lengths first.
    """
    with sparse(model, attn, calibration=calibration):
        plan = plan_of(model)
        assert plan is not None
        found = [(config, calibration.threshold(config, layer, NEVER)) for config, layer in plan.layers]
    return list(dict.fromkeys(describe(*one) for one in found)), max(int(one.value) for _, one in found)


def prefill(
    model: nn.Module, cache: list[Any], tokens: Sequence[int], seconds: float, update: Update, later: int = 0
) -> int:
    """Prefill ``tokens`` in chunks. Stop before a chunk that would exceed ``seconds``, but always run the first chunk.

    Args:
        seconds: time limit in seconds. The limit includes the estimated time of the ``later`` tokens.
        later: number of tokens that the caller prefills afterwards.

    Returns:
        The number of tokens that were added to the cache.
    """
    chunk, start, took, done = PREFILL_CHUNK, time.perf_counter(), 0.0, 0
    while done < len(tokens) and (not done or time.perf_counter() - start + took * (1 + later / chunk) < seconds):
        before = time.perf_counter()
        model(mx.array([tokens[done : done + chunk]]), cache=cache)
        mx.eval([layer.state for layer in cache])
        mx.clear_cache()
        took = time.perf_counter() - before
        update(min(chunk, len(tokens) - done))
        done = min(done + chunk, len(tokens))
    return done


def decode(
    model: nn.Module, tokenizer: Tokenizer, cache: list[Any], tokens: list[int], max_tokens: int, update: Update
) -> tuple[Decoded, list[mx.array]]:
    """Append ``tokens`` to the prompt ``cache`` and decode an answer greedily. Also return its log-probabilities."""
    greedy = make_sampler(temp=0.0)
    mx.reset_peak_memory()
    start = time.perf_counter()
    text, found, times, logprobs = "", [], [], []
    for part in stream_generate(model, tokenizer, tokens, max_tokens, sampler=greedy, prompt_cache=cache):
        text += part.text
        found.append(part.token)
        times.append(time.perf_counter())
        logprobs.append(part.logprobs.astype(mx.float32))
        update(1)
    first, steps = times[0] - start, [after - before for before, after in pairwise(times)]
    return Decoded(text, found, first, steps or [first], mx.get_peak_memory()), logprobs
