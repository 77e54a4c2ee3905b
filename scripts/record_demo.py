#!/usr/bin/env python3
"""Record `mlx-sparse try --fast-blas` as docs/demo.svg. The script needs no terminal and no recording service.

python scripts/record_demo.py [ARGUMENTS OF TRY]
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from rich.console import Console

from mlx_sparse.tools import try_model
from mlx_sparse.tools.assets import blas

TARGET = Path(__file__).parents[1] / "docs" / "demo.svg"


def main() -> int:
    """Run ``mlx-sparse try``, and write its output to the SVG file `TARGET`. Return the exit code of the command."""
    blas.restart_script(True)
    console = Console(record=True, width=try_model.WIDTH, highlight=False, markup=False)
    arguments = ["--fast-blas", *sys.argv[1:]]
    console.print("$ mlx-sparse try " + " ".join(arguments), style="bold")
    code = try_model.main(arguments, console)
    picture = console.export_svg(title="mlx-sparse try", unique_id="demo")
    # The picture loads no fonts from other servers.
    TARGET.write_text(re.sub(r"@font-face {.*?}", "", picture, flags=re.DOTALL), encoding="utf-8")
    print(TARGET)
    return code


if __name__ == "__main__":
    sys.exit(main())
