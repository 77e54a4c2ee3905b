"""Provide a transformers cache whose full-attention layers store auxiliary cache state for SparQ."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple, cast

import torch
from transformers.cache_utils import DynamicCache, DynamicLayer
from transformers.configuration_utils import PreTrainedConfig

from mlx_sparse.api.call_report import Report
from mlx_sparse.checks import ConfigError
from mlx_sparse.core.base import Step
from mlx_sparse.core.decide import NEVER
from mlx_sparse.methods import SparQ, parse
from mlx_sparse.methods.sparq.scoring_keys import KeyCodes

from ..launchers.sparq import sparq_attention
from . import require
from .buffers import Buffers, Padding

_NAME = "_mlx_sparse_origin"


class SparQLayer(DynamicLayer):
    """Cache layer for full attention, with auxiliary cache state for SparQ.

    Attributes:
        keys, values: ``(B, Hkv, S, D)``, slices of ``buffers``.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.buffers: Buffers | None = None

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self._set_views(Buffers(key_states, value_states))

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append keys and values ``(B, Hkv, L, D)``. Return all keys and values as slices of the buffers."""
        if self.buffers is None:
            self.lazy_initialization(key_states, value_states)
        assert self.buffers is not None
        self.buffers.append(key_states, value_states)
        return self._set_views(self.buffers)

    def _set_views(self, buffers: Buffers) -> tuple[torch.Tensor, torch.Tensor]:
        """Set the attributes that transformers reads, and return the keys and values in use."""
        self.buffers, self.is_initialized = buffers, True
        self.keys, self.values = (rows[:, :, : buffers.length] for rows in (buffers.keys, buffers.values))
        return self.keys, self.values

    def get_seq_length(self) -> int:
        return 0 if self.buffers is None else self.buffers.length

    def reset(self) -> None:
        self.buffers = self.keys = self.values = None
        self.is_initialized = False

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last ``-tokens_to_remove`` rows. As in transformers, ``tokens_to_remove`` is 0 or negative."""
        if tokens_to_remove > 0:
            raise ConfigError(
                f"tokens_to_remove: expected 0 or less, got {tokens_to_remove}. crop(-n) removes the last n tokens."
            )
        if self.buffers is not None and tokens_to_remove:
            self.buffers.crop(max(self.buffers.length + tokens_to_remove, 0))
            self._set_views(self.buffers)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.buffers is not None:
            self.batch_select_indices(
                torch.arange(len(self.buffers.keys), device=self.device).repeat_interleave(repeats)
            )

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep only the sequences at ``indices``, in the order of ``indices``. ``indices`` may be a bool mask."""
        if self.buffers is not None:
            sequences = indices.to(self.device)
            self.buffers.select(sequences.nonzero()[:, 0] if sequences.dtype == torch.bool else sequences)
            self._set_views(self.buffers)

    def offload(self) -> None:
        raise ConfigError(
            "offloading: expected no call, because SparQCache does not support it, got offload(). Use DynamicCache."
        )

    def attend(
        self, query: torch.Tensor, config: SparQ, *, scale: float, padding: Padding | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run SparQ for ``query (B, Hq, 1, D)``. Return ``out (B, Hq, 1, D)`` and float32 ``lse (B, Hq, 1)``."""
        assert self.keys is not None
        assert self.values is not None
        settings = config.at(self.keys.shape[2]).parameters(query.shape[1] // self.keys.shape[1])
        keys_t, value_mean, deviation = self.read(
            mean=settings["reallocate"],
            spread=config.component_score == "query_key",
            padding=padding,
            coded=config.key_bits < 16,
        )
        return sparq_attention(
            query,
            self.keys,
            self.values,
            keys_t=keys_t,
            value_mean=value_mean,
            component_weight=deviation,
            scale=scale,
            left_padding=None if padding is None else padding.first,
            **settings,
        )

    def read(
        self, *, mean: bool, spread: bool, padding: Padding | None, coded: bool = False
    ) -> tuple[torch.Tensor | KeyCodes, torch.Tensor | None, torch.Tensor | None]:
        """Return the scoring keys, the mean value and the spread of the key components for all rows in the cache.

        The scoring keys are ``keys_t (B, Hkv, D, S)``, or `KeyCodes` if ``coded`` is True. The mean value is
        None unless ``mean`` is True, and the spread is None unless ``spread`` is True.
        """
        assert self.buffers is not None
        if coded:
            assert self.keys is not None
            value_mean, _ = self.buffers.statistics(mean=mean, spread=False, padding=padding)
            codes = self.buffers.coded(padding)
            return codes.read(), value_mean, codes.spread(self.keys) if spread else None
        return self.buffers.columns(), *self.buffers.statistics(mean=mean, spread=spread, padding=padding)


class Origin(NamedTuple):
    """Cache and cache layer that returned the keys of an attention call."""

    cache: SparQCache
    layer: Any
    keys: torch.Tensor  # the keys as the layer returned them
    values: torch.Tensor

    def current(self, values: torch.Tensor) -> bool:
        """Return True if the layer has not changed since it returned `keys`, and it returned ``values`` with `keys`."""
        return self.keys is self.layer.keys and self.values is values


def origin_of(keys: torch.Tensor) -> Origin | None:
    """Return the `Origin` of ``keys``, or None if the keys do not come from a `SparQCache`."""
    found: Origin | None = getattr(keys, _NAME, None)
    return found


class SparQCache(DynamicCache):
    """A KV cache for models loaded with ``attn_implementation="sparq"``, for inference only.

    Full-attention layers are `SparQLayer`. Other layers, such as sliding-window layers, are unchanged and stay dense.

    Args:
        config: ``model.config``.
        attn: ``"sparq[:key=value,...]"`` or a `mlx_sparse.methods.SparQ`.

    Attributes:
        report: counts of sparse and dense attention calls, updated while the model runs.
        thresholds: crossover length in keys for each `Step` (sizes of a decode step) that has run.

    Raises:
        ConfigError: ``attn`` is invalid or does not fit the model, the model was not loaded with
            ``attn_implementation="sparq"``, or the model has no full-attention layer.
        BackendUnavailable: the Triton kernels cannot run on this machine.
    """

    def __init__(self, config: PreTrainedConfig, attn: str | SparQ = "sparq") -> None:
        require()
        if not isinstance(config, PreTrainedConfig):
            raise ConfigError(f"config: expected model.config of a transformers model, got {type(config).__name__}.")
        self.attn = _sparq(attn)
        text = config.get_text_config(decoder=True)
        if text._attn_implementation != "sparq":
            raise ConfigError(
                f"config: expected attn_implementation='sparq', got {text._attn_implementation!r}. "
                "Call mlx_sparse.cuda_ref.register() and model.set_attn_implementation('sparq')."
            )
        heads = getattr(text, "num_attention_heads", None)
        head_dim = getattr(text, "head_dim", None) or (text.hidden_size // heads if heads else None)
        if isinstance(head_dim, int):
            self.attn.check_head_dim(head_dim)
        # transformers created the layers. Replace its plain full-attention layers.
        super().__init__(config=config)
        self.layers = [SparQLayer() if type(layer) is DynamicLayer else layer for layer in self.layers]
        self.thresholds: dict[Step, int] = {}
        self.report = Report(
            attn=str(self.attn),
            backend="triton",
            model_type=config.model_type,
            model=config._name_or_path,
            layers=len(self.layers),
        )
        self.report.crossovers = partial(_crossovers, self.thresholds, "modeled" if self.attn.measurable else "given")
        self.report.dense_layers.update(reason for layer in self.layers if (reason := dense_layer(layer)))
        self.report.served_layers = len(self.layers) - self.report.dense_layers.total()
        if self.report.served_layers == 0:
            listed = ", ".join(f"{count} {reason}" for reason, count in self.report.dense_layers.items())
            raise ConfigError(
                f"config: expected a model with a full-attention layer, got {config.model_type}: {listed}."
            )

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append keys and values to layer ``layer_idx``, and return all keys and values of this layer.

        An attention function receives keys and values, but neither the cache nor the layer. The layer number of a
        module does not identify the cache. Some models pass the keys of one layer to other layers. Therefore the
        returned keys have an `Origin` attribute, which refers to the cache and the layer. Tensors derived from the
        keys, even slices, have no `Origin`, so attention to these tensors is dense. The attribute is set on a view
        that the cache does not store. Otherwise a copy of the cache would refer to the original cache.
        """
        if torch.is_grad_enabled() and (key_states.requires_grad or value_states.requires_grad):
            raise ConfigError(
                "past_key_values: expected a call without gradients, got keys that need them. "
                "Run the model under torch.no_grad() or torch.inference_mode(), or train with DynamicCache."
            )
        keys, values = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        tagged = keys.detach()
        setattr(tagged, _NAME, Origin(self, self.layers[layer_idx], keys, values))
        return tagged, values


# This is not a method, because the report would then keep the cache alive.
def _crossovers(thresholds: dict[Step, int], how: str) -> list[str]:
    """Return report lines with the crossover lengths, each followed by ``how`` ("modeled" or "given")."""
    lengths = (
        "never sparse" if keys >= NEVER else f"sparse at {keys:,} keys and longer" for keys in thresholds.values()
    )
    return [f"{length} ({how})" for length in dict.fromkeys(lengths)]


def dense_layer(layer: object) -> str | None:
    """Return the reason why a cache layer always attends densely, or None for a `SparQLayer`."""
    if isinstance(layer, SparQLayer):
        return None
    kind = "a sliding window" if getattr(layer, "is_sliding", False) else "a custom cache layer"
    return f"with {kind} ({type(layer).__name__})"


def _sparq(attn: str | SparQ) -> SparQ:
    configs = parse(attn) if isinstance(attn, str) else (attn,)
    if [getattr(config, "name", None) for config in configs] != [SparQ.name]:
        given = "+".join(map(str, configs))
        raise ConfigError(f"attn: expected sparq[:key=value,...] alone, got {given!r}.")
    return cast("SparQ", configs[0])
