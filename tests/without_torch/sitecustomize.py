"""Read by every Python that the tests start with this folder in PYTHONPATH."""

import sys

sys.modules["torch"] = None  # type: ignore[assignment]
