"""Parse the arguments of ``mlx-sparse export-onnx`` and run the export."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from mlx_sparse.checks import Parser, SparseAttentionError
from mlx_sparse.core.decide import NEVER
from mlx_sparse.extras import naming_missing

if TYPE_CHECKING:
    from .export import Exported


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status. After an error, print one line and exit with status 2."""
    parser = _parser()
    args = parser.parse_args(arguments)
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)  # remove partial files, as on Ctrl-C
    try:
        made = _export(args)
    except SparseAttentionError as error:
        parser.error(str(error))
    except OSError as error:
        parser.error(f"-o: expected a folder that can be written, got {args.out} ({error.strerror or error}).")
    except KeyboardInterrupt:
        parser.error(f"interrupted; {args.out} is unchanged.")
    finally:
        signal.signal(signal.SIGTERM, before)
    print(f"{args.out}: {made.method}, {made.max_length} tokens, {made.nbytes / 1e6:,.0f} MB.")
    print(f"Checked on onnxruntime: {made.agreement}.")
    if made.sparse_from is not None and made.sparse_from >= NEVER:
        print(
            "All decode steps are dense, because sparse steps without native kernels are slower at every length. If "
            "you use native kernels, set dense_below in --method."
        )
    elif made.sparse_from is not None and made.sparse_from > made.max_length:
        print(
            f"All decode steps are dense, because they become sparse at {made.sparse_from} keys and the caches have "
            f"{made.max_length}. Set a larger --max-length, or --native if only native kernels run the file."
        )
    return 0


@naming_missing()
def _export(args: argparse.Namespace) -> Exported:
    from .export import export

    return export(**vars(args))


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="export-onnx",
        description="Export an mlx-lm model to ONNX. The file runs on stock onnxruntime and onnxruntime-genai, and "
        "faster with the native kernels of this package.",
    )
    parser.add_argument(
        "--model", required=True, metavar="DIR_OR_REPO", help="Model folder or Hugging Face repository."
    )
    parser.add_argument(
        "-o", "--out", required=True, metavar="OUT", help="Output folder, which must not exist or must be empty."
    )
    parser.add_argument(
        "--method",
        default="sparq",
        metavar="METHOD[:KEY=VALUE,...]",
        help="'dense'; 'sparq' or 'saap' for decoding; 'sample' for prefill; or both: 'sample:dense_below=8192+sparq'. "
        "Parameters follow a colon: 'sparq:rank=16,top_k=256' or 'saap:artefact=FILE,probes=32' (default: sparq, which "
        "stores a second copy of the keys, or int4 scoring keys with --native).",
    )
    parser.add_argument(
        "--attn-config",
        metavar="FILE.toml",
        help="TOML file of parameters with tables [sparq], [sample] and [saap]; --method overrides it.",
    )
    parser.add_argument(
        "--max-length",
        type=int,
        metavar="N",
        help="Maximum number of prompt and generated tokens together. The caches have space for N tokens, "
        "rounded up to whole chunks (default: the limit of the model, at most 16384).",
    )
    parser.add_argument(
        "--dtype",
        metavar="TYPE",
        help="float32, float16 or bfloat16: type of the caches and of unquantized weights (default: the type of the "
        "model). 'float32' also dequantizes weights. Arithmetic is always float32.",
    )
    parser.add_argument(
        "--compat",
        action="store_true",
        help="Write opset 18 and IR 8, for older runtimes, instead of opset 24 and IR 11.",
    )
    parser.add_argument(
        "--inline", action="store_true", help="Replace local functions by nodes, for runtimes other than onnxruntime."
    )
    parser.add_argument(
        "--native",
        action="store_true",
        help="Only the native kernels of this package will run the file. It gets the settings of --attn: int4 scoring "
        "keys, and sparse decode steps from shorter contexts on.",
    )
    parser.add_argument(
        "--no-genai",
        dest="genai",
        action="store_false",
        help="Omit genai_config.json and unused states for onnxruntime-genai.",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
