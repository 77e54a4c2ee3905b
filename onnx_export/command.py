"""The command ``export-onnx``."""

from __future__ import annotations

import argparse
import sys

from mlx_sparse.checks import ConfigError, SparseAttentionError


def main(arguments: list[str] | None = None) -> int:
    """Run the command; return its exit status. A mistake is one line on standard error and status 2."""
    args = _parser().parse_args(arguments)
    try:
        from .exporter import export

        made = export(
            args.model,
            args.out,
            method=args.method,
            attn_config=args.attn_config,
            max_length=args.max_length,
            dtype=args.dtype,
            compat=args.compat,
            inline=args.inline,
            static=args.static,
            genai=not args.no_genai,
        )
    except (SparseAttentionError, ImportError) as error:
        return _fail(str(error))
    except OSError as error:
        return _fail(f"-o: expected a folder that can be written, got {args.out} ({error.strerror or error}).")
    print(f"{made.folder}: {made.method}, {made.max_length} tokens, {made.nbytes / 1e6:.0f} MB; {made.agreement}")
    return 0


def _fail(message: str) -> int:
    print(f"export-onnx: error: {message}", file=sys.stderr)
    return 2


def _pair(text: str) -> tuple[int, int]:
    try:
        batch, length = (int(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(f"--static: expected B,N, two numbers, got {text!r}.") from None
    return batch, length


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="export-onnx")
    parser.add_argument("--model", required=True)
    parser.add_argument("-o", "--out", required=True)
    parser.add_argument("--method", default="sparq")
    parser.add_argument("--attn-config")
    parser.add_argument("--max-length", type=int)
    parser.add_argument("--dtype")
    parser.add_argument("--compat", action="store_true")
    parser.add_argument("--inline", action="store_true")
    parser.add_argument("--static", type=_pair)
    parser.add_argument("--no-genai", action="store_true")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
