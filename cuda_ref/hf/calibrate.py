"""From where on SparQ pays on this GPU: steps of `SparQLayer` against transformers' own attention."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from mlx_sparse import crossing, measured
from mlx_sparse.crossing import Pairs
from mlx_sparse.methods import Method, Step, nvidia_kind
from mlx_sparse.thresholds import Layer, Thresholds, settings_text

from ..launchers import configs
from .cache import SparQLayer

PACKAGES = ("torch", "triton", "transformers")


class Calibration(Thresholds):
    """The thresholds of one user with `SparQCache`.

    In Triton's interpreter the times say nothing of a GPU; they are kept as those of a CPU.
    """

    def kind(self, layer: Layer) -> str:
        return "gpu"

    def question(self, config: Method, layer: Layer) -> measured.Question:
        settings = settings_text(config, layer.step.G)
        said = {**layer.sizes, "method": config.name, "settings": settings}
        return measured.question(layer.backend, name_of(layer.device), PACKAGES, **said)

    def free_memory(self, layer: Layer) -> int:
        if layer.device.type == "cuda":
            return int(torch.cuda.mem_get_info(layer.device)[0])
        import psutil  # type: ignore[import-untyped]  # not on every machine with a GPU

        return int(psutil.virtual_memory().available)

    def answer(self, config: Any, layer: Layer, seconds: float) -> dict[str, Any]:
        _pairs(config, layer, self.worth_asking(config), 0, 1)  # compiles the kernels, outside of the time
        return super().answer(config, layer, seconds)

    def pairs(self, config: Any, layer: Layer, S: int, seconds: float) -> Pairs:
        """A step goes through several layers before the GPU is waited for, each with a row more in its cache."""
        try:
            return _pairs(config, layer, S, seconds, self.layers(layer, S))
        except torch.OutOfMemoryError as error:
            raise MemoryError(f"{S:,} keys do not fit") from error


@torch.no_grad()
def _pairs(config: Any, layer: Layer, S: int, seconds: float, layers: int) -> Pairs:
    heads, G, D = layer.step.heads, layer.step.G, layer.step.D
    scale = D**-0.5
    random = torch.Generator(layer.device).manual_seed(S)  # the user's random numbers stay as they are

    def rows(heads: int, length: int) -> torch.Tensor:
        return torch.randn(1, heads, length, D, generator=random, device=layer.device, dtype=layer.dtype)

    def context() -> SparQLayer:
        made = SparQLayer()
        made.update(rows(heads, S), rows(heads, S))
        return made

    query, row = rows(heads * G, 1), rows(heads, 1)
    module = torch.nn.Module()  # what sdpa asks a model's attention
    module.num_key_value_groups, module.is_causal = G, True  # type: ignore[assignment]

    def dense(filled: SparQLayer, out: torch.Tensor) -> torch.Tensor:
        assert filled.keys is not None
        assert filled.values is not None
        attended = sdpa_attention_forward(module, out, filled.keys, filled.values, None, scaling=scale)[0]
        return attended.transpose(1, 2)

    def sparse(filled: SparQLayer, out: torch.Tensor) -> torch.Tensor:
        return filled.attend(out, config, scale=scale)[0]

    def timed(attend: Callable[[SparQLayer, torch.Tensor], torch.Tensor], caches: list[SparQLayer]) -> float:
        wait(layer.device)
        start, out = time.perf_counter(), query
        for filled in caches:
            filled.update(row, row)
            out = attend(filled, out)
        wait(layer.device)
        return (time.perf_counter() - start) / len(caches)

    sides = [[context() for _ in range(layers)] for _ in ("dense", "sparse")]
    return crossing.in_turns(partial(timed, dense, sides[0]), partial(timed, sparse, sides[1]), seconds)


def wait(device: torch.device) -> None:
    """Until the GPU has done what it was told to."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@cache
def name_of(device: torch.device) -> str:
    """What a measurement holds for."""
    if device.type != "cuda":
        return "CPU, Triton's interpreter"
    return f"{torch.cuda.get_device_name(device)}, sm_{configs.capability(device)}, CUDA {torch.version.cuda}"


@cache
def layer_of(heads: int, G: int, D: int, dtype: torch.dtype, device: torch.device) -> Layer:
    """The sizes of a layer with so many KV heads of all sequences."""
    return Layer("triton", Step(heads, G, D, dtype.itemsize, gpu_kind(device)), dtype, device=device)


def gpu_kind(device: torch.device) -> str:
    """The kind of GPU for `Step`; empty on the CPU."""
    return nvidia_kind(configs.capability(device)) if device.type == "cuda" else ""


def _say(text: str) -> None:
    print(f"[mlx-sparse] {text}", file=sys.stderr, flush=True)


CALIBRATION = Calibration(say=_say)  # of all caches of this process: what one has measured holds for the next
