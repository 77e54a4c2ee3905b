"""Read by every Python that the tests start with this folder in PYTHONPATH."""

from importlib.machinery import PathFinder

_find_spec = PathFinder.find_spec


def _find_others(name, path=None, target=None):
    return None if name == "torch" else _find_spec(name, path, target)


# Not as None in sys.modules: some packages take any entry there for torch itself.
PathFinder.find_spec = _find_others  # type: ignore[method-assign,assignment]
