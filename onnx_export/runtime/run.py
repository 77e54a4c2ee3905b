"""Run ``mlx-sparse run-onnx``: generate text with an exported model on onnxruntime."""

from __future__ import annotations

import argparse
import io
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from mlx_sparse.checks import ArtefactError, ConfigError, Parser, check_int
from mlx_sparse.methods import parse

from .runner import Array, Pick, Runner, first_line, most_likely

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase as Tokenizer

MAX_TOKENS = 256
RULE = "=" * 10


def main(argv: Sequence[str]) -> int:
    """Generate text and return the exit code."""
    args = _parser().parse_args(argv)
    pick = sampler(args.temp, args.top_p, args.seed)
    if args.max_tokens is not None:
        check_int("--max-tokens", args.max_tokens, 1)
    prompt = _prompt(args.prompt)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # some terminals cannot encode every character
    runner = Runner(args.model, native=args.native, threads=args.threads)
    tokenizer = load_tokenizer(runner.path.parent)
    tokens = encode(tokenizer, prompt, chat=not args.ignore_chat_template)
    # The default number of tokens is limited by the space in the caches.
    wanted = args.max_tokens or max(1, min(MAX_TOKENS, runner.max_length + 1 - len(tokens)))
    result = _generate(runner, tokenizer, tokens, wanted, pick, quiet=args.json)
    if args.json:
        print(json.dumps(vars(result)))
    else:
        print(result.summary())
    return 0


def _prompt(given: str) -> str:
    if given == "-" and sys.stdin is None:
        raise ConfigError("--prompt: expected text on standard input, which is closed.")
    try:
        text = sys.stdin.read() if given == "-" else given
        text.encode()  # raises for bytes that are not UTF-8, which Python accepts in some locales
    except UnicodeError:
        raise ConfigError("--prompt: expected text in UTF-8, got other bytes.") from None
    return text


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="mlx-sparse run-onnx", description="Generate text with a model that export-onnx wrote, on onnxruntime."
    )
    parser.add_argument("model", metavar="OUT", type=Path, help="the folder that export-onnx wrote")
    parser.add_argument("--prompt", "-p", metavar="TEXT", required=True, help="the prompt; - reads standard input")
    parser.add_argument(
        "--max-tokens", "-m", metavar="N", type=int, help=f"maximum number of new tokens (default: {MAX_TOKENS})"
    )
    parser.add_argument("--temp", type=float, default=0.0, help="temperature (default: 0, the most likely token)")
    parser.add_argument("--top-p", type=float, default=1.0, help="total probability of the sampled tokens")
    parser.add_argument("--seed", type=int, help="random seed for sampling")
    parser.add_argument(
        "--native",
        choices=("auto", "off"),
        default="auto",
        help="auto: native kernels if they were built; off: function bodies (default: auto)",
    )
    parser.add_argument("--threads", metavar="N", type=int, help="number of CPU threads (default: set by onnxruntime)")
    parser.add_argument("--ignore-chat-template", action="store_true", help="do not apply the chat template")
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end instead of the text")
    return parser


@dataclass(frozen=True)
class Result:
    """Generated text, token counts, speeds in tokens per second, attention method and kernels."""

    text: str
    prompt_tokens: int
    prompt_tps: float
    generation_tokens: int
    generation_tps: float
    finish_reason: str
    attention: str
    all_steps_dense: bool
    kernels: str

    def summary(self) -> str:
        """Format the statistics that are printed after the text, as in mlx-lm."""
        return (
            f"Prompt: {self.prompt_tokens} tokens, {self.prompt_tps:.3f} tokens-per-sec\n"
            f"Generation: {self.generation_tokens} tokens, {self.generation_tps:.3f} tokens-per-sec\n"
            f"Attention: {self.attention}{' (all steps dense)' if self.all_steps_dense else ''}, {self.kernels}"
        )


def _generate(
    runner: Runner, tokenizer: Tokenizer, prompt: list[int], wanted: int, pick: Pick, *, quiet: bool
) -> Result:
    """Generate at most ``wanted`` tokens. Unless ``quiet`` is True, print the text while it is generated.

    As in mlx-lm, the prompt time ends when the first new token is available.
    """
    pieces: list[str] = []
    detokenizer = Detokenizer(tokenizer)

    def write(piece: str) -> None:
        pieces.append(piece)
        if not quiet:
            print(piece, end="", flush=True)

    tokens = runner.generate(prompt, wanted, pick)
    if not quiet:
        print(RULE)
    start = first = time.perf_counter()
    count = 0
    for token in tokens:
        if not count:
            first = time.perf_counter()
        count += 1
        write(detokenizer.add(token))
    end = time.perf_counter()
    if not count:
        first = end
    write(detokenizer.rest())
    if not quiet:
        print(f"\n{RULE}")
    method = runner.metadata.get("mlx_sparse.method", "unknown")
    return Result(
        "".join(pieces),
        len(prompt),
        len(prompt) / (first - start),
        count,
        (count - 1) / (end - first) if count > 1 else 0.0,
        "length" if count == wanted else "stop",
        method,
        _all_steps_dense(method, runner.length),
        "native kernels" if runner.native else "function bodies (no native kernels)",
    )


def _all_steps_dense(method: str, keys: int) -> bool:
    """Return True if ``method`` has sparse decode steps, but not in contexts of up to ``keys`` tokens."""
    try:
        configs = [config for config in parse(method) if config.sparse and config.stage != "prefill"]
    except ConfigError:  # the metadata can contain any text
        return False
    return any(keys < config.shortest_context() for config in configs)


def load_tokenizer(folder: Path) -> Tokenizer:
    """Load the tokenizer of an exported folder. Download nothing, and run no code from the folder."""
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # do not warn that PyTorch is missing
    from transformers import AutoTokenizer
    from transformers.utils import logging

    logging.set_verbosity_error()
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # a damaged file can make the parsers raise any exception
        raise ArtefactError(f"model: expected a tokenizer in {folder}, got: {first_line(error)}") from None


def encode(tokenizer: Tokenizer, prompt: str, *, chat: bool) -> list[int]:
    """Return the token ids of a prompt. If ``chat`` is True, first apply the tokenizer's chat template, if any."""
    templated = chat and tokenizer.chat_template is not None
    if templated:
        message = [{"role": "user", "content": prompt}]
        try:
            prompt = str(tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True))
        except Exception as error:  # a template is a program and can raise any exception
            raise ArtefactError(
                f"model: expected a chat template that runs, got: {first_line(error)}. Set --ignore-chat-template."
            ) from None
    tokens = list(tokenizer.encode(prompt, add_special_tokens=not templated))
    if not tokens:
        raise ConfigError("--prompt: expected some text, got none.")
    return tokens


class Detokenizer:
    """Incremental detokenizer, which returns a character after all bytes of the character have been generated."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._tokens: list[int] = []  # the last returned tokens, which determine spaces, and pending tokens
        self._returned = 0

    def add(self, token: int) -> str:
        self._tokens.append(token)
        text = self.rest()
        if text.endswith("\ufffd"):  # an incomplete character
            return ""
        self._tokens = self._tokens[self._returned :]
        self._returned = len(self._tokens)
        return text

    def rest(self) -> str:
        """Return the text of the pending tokens, which ends the stream."""
        before = self._decode(self._tokens[: self._returned])
        return self._decode(self._tokens)[len(before) :]

    def _decode(self, tokens: list[int]) -> str:
        return str(self._tokenizer.decode(tokens)) if tokens else ""


def sampler(temp: float, top_p: float, seed: int | None) -> Pick:
    """Return a function that selects a token from logits. If ``temp`` is 0, select the argmax, else sample."""
    if not 0 <= temp < float("inf"):
        raise ConfigError(f"--temp: expected a number of at least 0, got {temp}.")
    if not 0 < top_p <= 1:
        raise ConfigError(f"--top-p: expected a number above 0 and at most 1, got {top_p}.")
    if seed is not None:
        check_int("--seed", seed, 0)
    random = np.random.default_rng(seed)

    def draw(logits: Array) -> int:
        weights = np.exp((logits - logits.max()).astype(np.float64))
        kept = np.arange(len(weights))
        if top_p < 1:
            kept = np.argsort(-weights, kind="stable")
            above = np.cumsum(weights[kept]) - weights[kept]
            kept = kept[above < top_p * weights.sum()]
        chances = weights[kept] ** (1 / temp)
        return int(random.choice(kept, p=chances / chances.sum()))

    return draw if temp else most_likely
