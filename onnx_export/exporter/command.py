"""The command ``export-onnx``."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn

from mlx_sparse.checks import SparseAttentionError, shortened
from mlx_sparse.extras import naming_missing
from mlx_sparse.methods import NEVER
from mlx_sparse.methods.text import removed

if TYPE_CHECKING:
    from .export import Exported


class _Parser(argparse.ArgumentParser):
    """A mistake is one line, without the usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {shortened(message)}\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status. A mistake is one line on standard error and status 2."""
    parser = _parser()
    given = list(sys.argv[1:] if arguments is None else arguments)
    if instead := _removed(given):
        parser.error(instead)
    args = parser.parse_args(given)
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)  # what is half written goes, as on Ctrl-C
    try:
        made = _export(args)
    except SparseAttentionError as error:
        parser.error(str(error))
    except OSError as error:
        parser.error(f"-o: expected a folder that can be written, got {args.out} ({error.strerror or error}).")
    except KeyboardInterrupt:
        parser.error(f"interrupted; {args.out} is as it was.")
    finally:
        signal.signal(signal.SIGTERM, before)
    print(f"{args.out}: {made.method}, {made.max_length} tokens, {made.nbytes / 1e6:,.0f} MB.")
    print(f"Checked on onnxruntime: {made.agreement}.")
    if made.sparse_from is not None and made.sparse_from >= NEVER:
        print("It decodes densely: no length pays without native kernels. With them give --dense-below.")
    elif made.sparse_from is not None and made.sparse_from > made.max_length:
        print(
            f"It decodes densely: sparse steps begin at {made.sparse_from} keys and it holds {made.max_length} tokens. "
            "Give a larger --max-length, or dense_below."
        )
    return 0


@naming_missing()
def _export(args: argparse.Namespace) -> Exported:
    from .export import export

    return export(
        args.model,
        args.out,
        method=args.method,
        attn_config=args.attn_config,
        dense_below=args.dense_below,
        max_length=args.max_length,
        dtype=args.dtype,
        compat=args.compat,
        inline=args.inline,
        native=args.native,
        genai=not args.no_genai,
    )


def _removed(arguments: Sequence[str]) -> str | None:
    """Return a message for the first option of an earlier version, None if there is none."""
    words = [part for word in arguments for part in word.split("=", 1)]
    for option, value in zip(words, [*words[1:], ""], strict=True):
        if replacement := removed("export-onnx", option, value):
            return f"{option}: {replacement}."
    return None


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="export-onnx",
        description="Export a model that mlx-lm loads to ONNX. The file runs on a stock onnxruntime, faster where the "
        "native kernels of this package are registered, and under onnxruntime-genai.",
    )
    parser.add_argument("--model", required=True, metavar="DIR_OR_REPO", help="A folder, or a repository of the hub.")
    parser.add_argument(
        "-o", "--out", required=True, metavar="OUT", help="A folder that does not exist or is empty, for the result."
    )
    parser.add_argument(
        "--method",
        default="sparq",
        metavar="METHOD[:KEY=VALUE,...]",
        help="'dense'; 'sparq' or 'saap' for decoding, 'sample' for prompts, or both, such as 'sample+sparq', with "
        "parameters such as 'sparq:rank=16,top_k=256' or 'saap:artefact=FILE,probes=32' (default: sparq, with a "
        "second copy of the keys; 'sparq:key_bits=4' with --native stores 4-bit codes instead).",
    )
    parser.add_argument(
        "--attn-config",
        metavar="FILE.toml",
        help="Parameters from a TOML file with tables [sparq], [sample] and [saap]; --method wins.",
    )
    parser.add_argument(
        "--dense-below",
        type=int,
        metavar="N",
        help="Keys below which decode steps are dense, as dense_below=N in --method (default: the documented model, "
        "which is the same for all machines, because files travel).",
    )
    parser.add_argument(
        "--max-length",
        type=int,
        metavar="N",
        help="Tokens that prompt and answer may have together. The caches are allocated for all of them, rounded up to "
        "whole chunks (default: what the model allows, at most 4096).",
    )
    parser.add_argument(
        "--dtype",
        metavar="TYPE",
        help="float32, float16 or bfloat16: type of the caches and of weights that are not quantised (default: the "
        "model's). 'float32' also dequantises. Arithmetic is float32 in any case.",
    )
    parser.add_argument(
        "--compat", action="store_true", help="Opset 18 and IR 8, for older runtimes, instead of opset 24 and IR 11."
    )
    parser.add_argument(
        "--inline", action="store_true", help="Without local functions, for runtimes other than onnxruntime."
    )
    parser.add_argument(
        "--native",
        action="store_true",
        help="The native kernels of this package will be registered where the file runs. Needed for key_bits=4.",
    )
    parser.add_argument("--no-genai", action="store_true", help="Without genai_config.json and what it needs.")
    return parser


if __name__ == "__main__":
    sys.exit(main())
