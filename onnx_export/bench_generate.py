"""Measure the decode speed of exported float32 models in tokens/s, for ``mlx-sparse bench generate --runtime onnx``.

With one thread, seconds are processor time, which other programs on the machine change less.

With a prefill method, every turn prefills the start of a text, and measures the time to the first token. Otherwise the
caches are filled with random numbers, because decode speed depends only on the context length, and prefill of 32,768
tokens would take half an hour on a CPU. `Decoder.check` compares the logits of all backends for random caches.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from mlx_lm.utils import load_tokenizer

from mlx_sparse.core.base import Prefill
from mlx_sparse.lm.hooks.saap import load_artefact
from mlx_sparse.methods import parse
from mlx_sparse.tools.bench.core import check_memory
from mlx_sparse.tools.bench.generate import Context, Generation, first_tokens
from mlx_sparse.tools.environment import memory

from .bench import LARGEST_SHARE
from .exporter.export import export, methods_of
from .runtime import native
from .runtime.runner import Runner

MODES = {"native": "auto", "standard": "off"}  # from a backend to the argument `native` of `Runner`
TOKENS = (5, 6, 7)  # token ids that the check decodes
# Tolerance of the median token, relative to the largest logit. At a near tie, rounding changes the keys that a layer
# selects, and over random caches, all logits of this token.
MOST_ERROR = 0.05


def variants(
    model: str, methods: Sequence[str], lengths: Sequence[int], tokens: int, *, threads: int, text: str
) -> Iterator[list[Generation]]:
    """Export a model with each method. For each context length, yield one decoder per method and backend."""
    capacity = max(lengths) + tokens + 1
    modes = {backend: mode for backend, mode in MODES.items() if mode == "off" or not native.unavailable()}
    clock = time.process_time if threads == 1 else time.perf_counter
    prefills = any(isinstance(config, Prefill) for method in methods for config in parse(method))
    prompt = first_tokens(load_tokenizer(model), text, max(lengths)) if prefills else []
    with tempfile.TemporaryDirectory(prefix="mlx-sparse-bench-") as scratch:
        decoders, below = list[dict[str, Runner]](), list[int]()
        for i, method in enumerate(methods):
            folder = Path(scratch) / str(i)
            coded = any(getattr(config, "key_bits", 16) < 16 for config in methods_of(method, None, native=False))
            file = export(model, folder, method=method, max_length=capacity, dtype="float32", genai=False, native=coded)
            below.append(file.sparse_from or 0)
            run_by = {backend: mode for backend, mode in modes.items() if mode == "auto" or not coded}
            decoders.append({backend: Runner(folder, native=mode, threads=threads) for backend, mode in run_by.items()})
        for S in lengths:
            named = list(zip(methods, decoders, below, strict=True))
            for method, runners, _ in named:
                for runner in runners.values():
                    fill(runner.caches, method)
            yield [
                Decoder(Context(S), *one, backend, tokens, clock, prompt[:S])
                for backend in modes
                for one in named
                if backend in one[1]
            ]


def fill(caches: Mapping[str, np.ndarray], method: str) -> None:
    """Fill the caches with random numbers. The seed is fixed, so that all backends get the same numbers."""
    check_memory(2 * sum(array.nbytes for array in caches.values()), memory(), LARGEST_SHARE)
    rng = np.random.Generator(np.random.SFC64(1))
    noise = rng.standard_normal(max(array.size for array in caches.values()), np.float32)
    for name, array in caches.items():
        if array.dtype.kind == "i":
            configs: list[Any] = [config for config in parse(method) if config.pre_rope]
            artefact: Any = load_artefact(configs[0])
            array[...] = rng.integers(0, artefact.buckets, array.shape, array.dtype)
        elif name.startswith(("past_sums.", "past_summary.")):
            array[...] = 1.0  # running statistics must be positive
        elif name.startswith("past_key_codes."):
            array[..., :4] = np.array([-2, 0.25], np.float16).view(np.uint8)  # minimum and step of each group
            array[..., 4:] = rng.integers(256, size=array[..., 4:].shape, dtype=np.uint8)
        else:
            array[...] = noise[: array.size].reshape(array.shape)


class Decoder(Generation):
    """Benchmark variant that decodes with one exported file on one backend."""

    def __init__(
        self,
        context: Context,
        method: str,
        runners: Mapping[str, Runner],
        below: int,
        backend: str,
        tokens: int,
        clock: Callable[[], float],
        prompt: list[int],
    ) -> None:
        super().__init__(context, method, backend, error=None)
        self._runners, self._runner, self._tokens, self._clock = runners, runners[backend], tokens, clock
        self._prompt = prompt
        if method != "dense" and context.S < below:
            self.remark = f"decode steps are dense below {below:,} keys"

    def _first(self, runner: Runner, token: int) -> np.ndarray:
        runner.resume_at(self.case.S)
        return runner.step([[token]]).copy()

    def check(self) -> str | None:
        errors = []
        for token in TOKENS:
            ours, *others = (self._first(runner, token) for runner in self._runners.values())
            errors.append(float(np.abs((others or [ours])[0] - ours).max() / np.abs(ours).max()))
        self.row.details["error"] = typical = float(np.median(errors))
        if typical <= MOST_ERROR < max(errors):
            self.remark = "the logits of one token differ between backends, as after a near tie"
        wrong = f"wrong result: the logits differ between backends by {typical:.1e} of the largest logit"
        return None if typical <= MOST_ERROR else wrong

    def run(self, turn: int) -> float:
        if self._prompt:
            self._runner.reset()
            start = self._clock()
            logits = self._runner.prefill(self._prompt)
            self.measured["time_to_first_token"].append(self._clock() - start)
        else:
            logits = self._first(self._runner, TOKENS[0])
        token = int(logits[0].argmax())
        start = self._clock()
        for _ in range(self._tokens):
            token = int(self._runner.step([[token]])[0].argmax())
        seconds = self._clock() - start
        self.measured["generation"].append(self._tokens / seconds)
        return seconds
