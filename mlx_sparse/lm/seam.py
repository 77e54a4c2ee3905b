"""Replace the attention functions that the models of mlx-lm and mlx-vlm call."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import version
from typing import Any

import mlx.core as mx
from mlx import nn

from ..cache import kv_cache
from ..checks import BackendUnavailable
from ..model_info import package_of
from .call import dispatching

NAME = "scaled_dot_product_attention"
SUPPORTED = {"mlx_lm": "mlx-lm 0.31.3 or 0.32", "mlx_vlm": "mlx-vlm 0.6.5 to 0.7"}
Place = tuple[int, str]  # id of the global variables of a model file, and the name of the attention function there
PARAMETERS = ["queries", "keys", "values", "cache", "scale", "mask", "sinks"]


def _storing_ends(prepare: Any) -> Callable[..., None]:
    """Wrap `BatchKVCache.prepare` so that it stores the end row of each prompt in ``cache.prompt_ends``."""

    def prepare_and_store_ends(cache: Any, *, lengths: list[int] | None = None, **padding: object) -> None:
        prepare(cache, lengths=lengths, **padding)
        cache.prompt_ends = None if lengths is None else [cache.size() + length for length in lengths]

    return prepare_and_store_ends


class Library:
    """Functions of mlx-lm or mlx-vlm that `bind` replaces, and the replacements.

    Attributes:
        package: "mlx_lm" or "mlx_vlm".
        caches: the module of the cache classes.
        original: the attention function.
        attention: the replacement of ``original``.
        bound: for each name that `bind` replaced, as (id of the global variables, name): the global variables and the
            number of enabled models that use them.
    """

    def __init__(self, package: str) -> None:
        self.package = package
        self.caches: Any = import_module(f"{package}.models.cache")
        self.original: Callable[..., mx.array] = getattr(import_module(f"{package}.models.base"), NAME)
        self.attention = dispatching(self.original)
        self.bound: dict[Place, tuple[dict[str, object], int]] = {}
        self.prepare: Any = getattr(self.caches.BatchKVCache, "prepare", None)
        self.prepare_and_store_ends = _storing_ends(self.prepare)
        self.merge = inspect.getattr_static(self.caches.KVCache, "merge", None)

    def bind(self, scopes: dict[int, dict[str, object]]) -> list[Place]:
        """Replace the attention function in the global variables ``scopes``, and return the replaced names."""
        ours = (self.original, self.attention)
        places = [
            (key, name)
            for key, scope in scopes.items()
            for name, value in scope.items()
            if any(value is function for function in ours)
        ]
        for key, name in places:
            _, models = self.bound.get((key, name), (None, 0))
            self.bound[key, name] = scopes[key], models + 1
            scopes[key][name] = self.attention
        if places:
            self.caches.BatchKVCache.prepare = self.prepare_and_store_ends
            self.caches.KVCache.merge = staticmethod(kv_cache.merge)
        return places

    def unbind(self, places: list[Place]) -> None:
        """Undo one call to `bind`. Restore the library's functions once all calls are undone."""
        for place in places:
            if place in self.bound:
                scope, models = self.bound.pop(place)
                if models > 1:
                    self.bound[place] = scope, models - 1
                else:
                    scope[place[1]] = self.original
        if not self.bound:
            self.caches.BatchKVCache.prepare = self.prepare
            self.caches.KVCache.merge = self.merge


LIBRARIES = {"mlx_lm": Library("mlx_lm")}
original, scaled_dot_product_attention = LIBRARIES["mlx_lm"].original, LIBRARIES["mlx_lm"].attention


def library_of(model: nn.Module) -> Library:
    """Return the library that has loaded ``model``. mlx-vlm is imported only for a model of mlx-vlm."""
    package = package_of(model)
    if package not in LIBRARIES:
        kv_cache.register_vlm(import_module(f"{package}.models.cache"))
        LIBRARIES[package] = Library(package)
    return LIBRARIES[package]


def bind(model: nn.Module) -> list[Place]:
    """Replace the attention function in the files of ``model``, and return the replaced names.

    Each model file has its own reference to the library's function, so every file must be changed. The function also
    replaces `KVCache.merge` and `BatchKVCache.prepare`, because the libraries call both before they call the model.
    """
    classes = {cls for _, module in model.named_modules() for cls in type(module).__mro__}
    # A model's own architecture file is not in sys.modules, so find the global variables of its functions.
    found = [getattr(value, "__globals__", {}) for cls in classes for value in vars(cls).values()]
    scopes = {id(scope): scope for scope in found if scope is not globals()}  # this file's `reduce_as`
    library_of(model)
    return [place for library in LIBRARIES.values() for place in library.bind(scopes)]


def unbind(places: list[Place]) -> None:
    """Undo one call to `bind`. Restore the functions of mlx-lm and mlx-vlm once all calls are undone."""
    for library in LIBRARIES.values():
        library.unbind(places)


def changed_interfaces(package: str = "mlx_lm") -> list[str]:
    """Return a list of text lines, one for each interface of ``package`` that differs from the supported versions."""
    problems = []
    found = getattr(import_module(f"{package}.models.base"), NAME, None)
    if package in LIBRARIES:
        found = LIBRARIES[package].original
    if not callable(found) or list(inspect.signature(found).parameters) != PARAMETERS:
        problems.append(f"{package}.models.base.{NAME} has other parameters")
    if not callable(getattr(import_module(f"{package}.utils"), "load_model", None)):
        problems.append(f"{package}.utils.load_model is missing")
    caches = import_module(f"{package}.models.cache")
    for name, members in (
        ("KVCache", "update_and_fetch state trim make_mask nbytes merge"),
        ("QuantizedKVCache", "update_and_fetch state trim make_mask nbytes"),
        ("BatchKVCache", "update_and_fetch state prepare finalize filter extend make_mask"),
    ):
        cls = getattr(caches, name, None)
        problems += [f"{name}.{member} is missing" for member in members.split() if not hasattr(cls, member)]
    if not problems:
        cache = caches.KVCache()
        rows = mx.zeros((1, 1, 1, 1))
        cache.update_and_fetch(rows, rows)
        if [getattr(entry, "ndim", None) for entry in cache.state[:2]] != [4, 4] or cache.offset != 1:
            problems.append("KVCache no longer stores keys, values and an offset")
        packed = caches.QuantizedKVCache(group_size=32, bits=8)
        packed.update_and_fetch(*(mx.zeros((1, 1, 1, 32)) for _ in range(2)))
        if [part.shape[3] for part in packed.keys] != [8, 1, 1] or (packed.bits, packed.offset) != (8, 1):
            problems.append("QuantizedKVCache no longer stores codes, scales and biases")
    return problems


def require(package: str = "mlx_lm") -> None:
    """Raise `BackendUnavailable` if `changed_interfaces` finds a change, because attention could silently be dense."""
    problems = changed_interfaces(package)
    if problems:
        name, supported = package.replace("_", "-"), SUPPORTED[package]
        raise BackendUnavailable(
            f"{name}: expected the interfaces of {supported}, got version {version(name)} where "
            f"{'; '.join(problems)}. Install {supported}."
        )


def reduce_as(cls: type, attribute: str) -> Callable[..., tuple[object, ...]]:
    """Return a ``__reduce_ex__`` that copies and pickles objects as instances of ``cls``, but omits ``attribute``."""

    def reduce(self: Any, protocol: int) -> tuple[object, ...]:
        reduced: Any = cls.__reduce_ex__(self, protocol)  # type: ignore[call-arg]
        make, (_, *args), state, *items = reduced
        return make, (cls, *args), {key: value for key, value in state.items() if key != attribute}, *items

    return reduce
