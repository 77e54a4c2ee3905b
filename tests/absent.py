"""Environments of processes that are to lack a package or the network."""

import os
from pathlib import Path

# Neither pip nor the hub's client gets anything.
OFFLINE = {"PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": "", "HF_HUB_OFFLINE": "1"}


def without(*packages: str) -> dict[str, str]:
    """What to add to the environment of a Python that is to find none of ``packages``."""
    return {"PYTHONPATH": str(Path(__file__).with_name("without")), "WITHOUT": ",".join(packages)}
