"""Read by every Python that the tests start with this folder in PYTHONPATH: the packages in WITHOUT are not found."""

import os
from importlib.machinery import PathFinder

_find_spec = PathFinder.find_spec
_absent = os.environ["WITHOUT"].split(",")


def _find_others(name, path=None, target=None):
    return None if name in _absent else _find_spec(name, path, target)


# Not as None in sys.modules: some packages take any entry there for torch itself.
PathFinder.find_spec = staticmethod(_find_others)  # type: ignore[method-assign,assignment]
