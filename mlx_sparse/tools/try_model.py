"""Implement ``mlx-sparse try``: answer a question about a long text with dense and with sparse attention."""

from __future__ import annotations

import argparse
import json
import sys
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from .. import blas
from ..checks import ConfigError, Parser, check_int, read_length
from ..core.base import Prefill
from ..core.decide import NEVER
from ..files import cache_directory
from ..methods import parse
from . import environment
from .assets import openblas
from .assets.models import DEFAULT, add_model_options, check_model, find_model
from .evaluate import texts
from .progress import stage
from .terminal import WIDTH
from .verdict import MAX_KL, verdict

if TYPE_CHECKING:
    from .comparison import Comparison

KEY = "71853"
NOTE = f"A note to the reader: the pass key of this text is {KEY}. Please remember that the pass key is {KEY}."
QUESTION = "That was the text. What is the pass key? Answer with: The pass key is, and its five digits."
AFTER_KEY = 4000  # characters between the pass key and the question
MARGIN = 3  # ratio of the default context to the crossover length
SECONDS = 60.0  # longest time of the prefill
BAR = 40  # characters of the longer bar
LIMITS = {
    "time": f", the longest that fits into about {SECONDS:.0f} s",
    "text": ", the whole text",
    "model": ", the longest that the model supports",
}


def main(argv: Sequence[str]) -> int:
    """Run ``mlx-sparse try``. Return 0 if the dense and the sparse answer were decoded."""
    args = _parser().parse_args(argv)
    args.context = None if args.context is None else read_length(args.context, "--context")
    check_int("--max-tokens", args.max_tokens, 2)
    configs = parse(args.attn)
    if len(configs) != 1 or isinstance(configs[0], Prefill):
        raise ConfigError(f"--attn: expected one decode method such as sparq, got {args.attn}.")
    cache = cache_directory(args.cache_dir)
    check_model(args.model, cache, args.accept_license)
    texts.check(args.text)
    if args.fast_blas:
        openblas.fetch_libraries(cache)
    blas.load(cache)
    # Files and pipes have no width.
    console = Console(stderr=args.json, highlight=False, markup=False, width=None if sys.stdout.isatty() else WIDTH)
    if note := blas.note():
        console.print(note)
    with stage(console, "loading mlx-lm and the model"):
        # These imports take seconds, so show a message first.
        from ..calibrate import Calibration
        from ..lm.loading import unfit_warning
        from ..model_info import model_type
        from .comparison import Length, compare, encode_prompt
        from .evaluate.inputs import load_model

        model, tokenizer, _ = load_model(args.model, args.cache_dir, args.accept_license, only_mlx_lm=True)
    document = "\n\n".join(text.text for text in texts.read(args.text, cache=cache))
    prompt = encode_prompt(tokenizer, *split_text(document, args.question))
    name, family = args.model or DEFAULT, model_type(model)
    machine = environment.hardware()
    console.print(f"{name} ({family}) on {machine['chip'] or machine['architecture']}")
    console.print(f"Question: {args.question or f'the pass key {KEY}, hidden {AFTER_KEY:,} characters before the end'}")
    found = compare(
        model,
        tokenizer,
        prompt,
        configs[0],
        Length(args.context, MARGIN, SECONDS),
        max_tokens=args.max_tokens,
        calibration=Calibration(measures=True),
        console=console,
    )
    if args.json:
        print(json.dumps({"model": name, "family": family} | found.as_dict()))
    else:
        show(found, find_model(args.model, cache, args.accept_license), unfit_warning(family), console)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="mlx-sparse try",
        description=textwrap.fill(
            "Ask a model about a long text. The text is prefilled once; then the answer is decoded with dense and with "
            "sparse attention. The result compares speed, bytes, memory and answers, and ends with the --attn text to "
            f"copy. The prompt has at least 8,192 tokens and {MARGIN} times the crossover length, the context length "
            f"at which the method is faster on this machine, or as many tokens as {SECONDS:.0f} s of prefill allow. On "
            "a CPU, native kernels run the prefill, and native dense steps are measured too. The default model is "
            "small: 93 MB to download, and 540 MB on disk.",
            78,
        ),
        epilog="Example:\n  mlx-sparse try MODEL --text notes.txt --question 'Who is Ann?' --context 32k",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_model_options(parser)
    parser.add_argument(
        "--text", metavar="TEXT", nargs="+", help=f"files, or {', '.join(texts.NAMES)} (default: {texts.DEFAULT})"
    )
    parser.add_argument("--question", metavar="TEXT", help="question after the text (default: a hidden pass key)")
    parser.add_argument("--attn", metavar="METHOD", default="sparq", help="a decode method (default: %(default)s)")
    parser.add_argument("--context", metavar="N", help="tokens of the prompt, such as 8192 or 32k")
    parser.add_argument("--max-tokens", metavar="N", type=int, default=48, help="tokens to generate (default: 48)")
    parser.add_argument("--cache-dir", metavar="DIR", help="folder for downloads (default: the user's cache folder)")
    openblas.add_option(parser)
    parser.add_argument("--json", action="store_true", help="print the result as one JSON object")
    return parser


def split_text(text: str, question: str | None) -> tuple[str, str]:
    """Split the prompt into a first part that may be cut to fit the context, and a rest that ends with the question.

    If ``question`` is None, the rest asks for a pass key. The pass key is inserted `AFTER_KEY` characters before the
    end of ``text``.
    """
    if question is not None:
        return text, f"\n\n{question}"
    cut = text.rfind(" ", 0, max(len(text) - AFTER_KEY, len(text) // 2)) + 1
    return text[:cut], f"\n\n{NOTE}\n\n{text[cut:]}\n\n{QUESTION}"


def show(found: Comparison, name: str, warning: str | None, console: Console) -> None:
    """Print the advice, the dense and the sparse answer, and the measurements.

    Args:
        name: path or Hugging Face repository of the model, for a command that mlx-lm can run.
    """
    for line in found.crossovers:
        console.print(f"{found.attn}: {line}")
    how = f"{found.prefill_seconds:.0f} s" + (" with native dense attention" if found.native else "")
    console.print(f"Prompt: {found.context:,} tokens, prefilled in {how}{_reason(found)}.\n")
    for line in [*advice(found, name, warning), ""]:
        console.print(line, soft_wrap="--model" in line)  # a command stays one line, so that it can be copied
    table = Table("", "dense", found.attn, box=None, pad_edge=False, padding=(0, 3, 0, 0))
    dense, sparse = found.dense, found.sparse
    table.add_row("answer", Text(dense.text.strip()), Text(sparse.text.strip()))
    if moved := found.bytes_per_token("dense"):
        table.add_row("K/V per token", _megabytes(moved), _megabytes(found.bytes_per_token("sparse") or 0))
    table.add_row("first step", f"{dense.steps[0]:.2f} s", f"{sparse.steps[0]:.2f} s")
    table.add_row("peak memory", _megabytes(dense.peak_memory), _megabytes(sparse.peak_memory))
    console.print(table, "")
    width = max(map(len, found.speeds)) + 2
    for label, speed in found.speeds.items():
        bar = "█" * max(1, round(BAR * speed / max(found.speeds.values())))
        console.print(f"{label:<{width}}{bar} {speed:.1f} tokens/s", style="green" if label == "sparse" else "none")


def advice(found: Comparison, model: str, warning: str | None) -> list[str]:
    """Return sentences: the verdict with the command to use, then the speed-up and the agreement of the two answers."""
    same = "are identical" if found.identical else f"agree in the first {found.same_tokens} tokens"
    lines = [*_verdict(found, model), *([f"Warning: {warning}."] if warning else [])]
    lines.append(f"{found.attn} is {found.speedup:.2f} x as fast as dense attention here. The answers {same}")
    lines.append(f"(mean KL divergence {found.kl:.4f} nats over {found.compared} tokens; the limit is {MAX_KL}).")
    if found.native is not None:
        plain, native, sparse = found.speeds.values()
        lines.append(f"Native kernels alone make dense attention {native / plain:.2f} x as fast. Compared with")
        lines.append(f"native dense attention, {found.attn} is {sparse / native:.2f} x as fast.")
    if not found.report["sparse_calls"]:
        cause = "noise" if found.native is None else "from native kernels"
        lines.append(f"Every step was dense ({', '.join(found.report['dense_calls'])}): the difference is {cause}.")
    return [*lines, "`mlx-sparse advise` measures on your text whether it is safe for this model."]


def _verdict(found: Comparison, model: str) -> list[str]:
    slower = found.context >= found.crossover and found.speeds["sparse"] < max(found.speeds.values())
    return verdict(
        model,
        found.attn,
        unsafe="" if found.safe else f"the answers agree in {found.same_tokens} of {found.compared} tokens",
        useless=f"dense attention is faster at {found.context:,} tokens" if slower else "",
        crossover=found.crossover,
        shorter=f"this prompt has {found.context:,}{_reason(found)}" if found.context < found.crossover else "",
    )


def _reason(found: Comparison) -> str:
    """Return the reason for the prompt length, or "" if the user gave the length."""
    if found.limit:
        return LIMITS[found.limit]
    if 0 < found.crossover < NEVER and found.context == MARGIN * found.crossover:
        return f", {MARGIN} times the crossover length"
    return ""


def _megabytes(count: float) -> str:
    return f"{count / 1e6:,.1f} MB"
