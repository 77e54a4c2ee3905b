#!/usr/bin/env python3
"""Record `mlx-sparse try --fast-blas` as docs/demo.svg, without a terminal or another service.

python scripts/record_demo.py [ARGUMENTS OF TRY]
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console

from mlx_sparse.files import cache_directory
from mlx_sparse.tools import try_model
from mlx_sparse.tools.assets import blas

TARGET = Path(__file__).parents[1] / "docs" / "demo.svg"


def main() -> int:
    """Run the command, and write its output as a picture. Return the exit code of the command."""
    variables = blas.child_environment(True, cache_directory())
    if variables != dict(os.environ):  # a library can be preloaded only when a process starts
        os.execve(sys.executable, [sys.executable, *sys.argv], variables)
    console = Console(record=True, width=try_model.WIDTH, highlight=False, markup=False)
    arguments = ["--fast-blas", *sys.argv[1:]]
    console.print("$ mlx-sparse try " + " ".join(arguments), style="bold")
    code = try_model.main(arguments, console)
    # The picture loads no fonts from other servers.
    picture = re.sub(r"@font-face {{.*?}}", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)
    console.save_svg(str(TARGET), title="mlx-sparse try", code_format=picture, unique_id="demo")
    print(TARGET)
    return code


if __name__ == "__main__":
    sys.exit(main())
