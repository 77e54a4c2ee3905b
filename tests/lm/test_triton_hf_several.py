"""`SparQCache` with ``verify=sparse``: calls of a few queries over it, and what they leave beside it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from cache_rows import padded, states
from cases import Array
from mlx_sparse.cuda_ref import hf
from mlx_sparse.cuda_ref.hf import attention, padding
from torch_arrays import DEVICE, to_numpy
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface

from mlx_sparse import oracle
from mlx_sparse.common import reasons
from mlx_sparse.methods import parse

D, HKV = 64, 2
SETTINGS = {
    "16 bits": "sparq:rank=16,top_k=12,component_score=query,key_bits=16,verify=sparse",
    "16 bits, mixed": "sparq:rank=16,top_k=12,key_bits=16,component_score=query_key,reallocate=true,verify=sparse",
    # Sums of logits, which are never held in 8 bits.
    "4 bits": "sparq:rank=16,top_k=12,component_score=query,key_bits=4,group_reduce=logits,verify=sparse",
}


def config(**changes: Any) -> Any:
    sizes = {"hidden_size": 96, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 64, "head_dim": D}
    heads = {"num_attention_heads": 8, "num_key_value_heads": HKV}
    made = AutoConfig.for_model("llama", **{**sizes, **heads, **changes})
    made._attn_implementation = "sparq"
    return made


class Calls:
    """Calls of an attention layer over one cache, with the rows that it should have seen."""

    def __init__(self, attn: str, B: int = 1, first: tuple[int, ...] | None = None) -> None:
        self.cache, self.B, self.first = hf.SparQCache(config(), attn), B, first
        self.module = torch.nn.Module()
        self.module.num_key_value_groups = 4
        self.rows = 0

    @property
    def layer(self) -> hf.SparQLayer:
        return self.cache.layers[0]

    def __call__(self, L: int, Hq: int = 8, seed: int = 0) -> tuple[torch.Tensor, Array]:
        """The result of a call ``(B, Hq, L, D)``, and what the oracle makes of the same rows."""
        self.rows += L
        query = torch.from_numpy(np.random.default_rng(seed).standard_t(3, size=(self.B, L, Hq, D))).float()
        query = query.to(DEVICE).transpose(1, 2)  # as models have it
        with torch.no_grad():
            keys, values = states(self.B, HKV, L, D=D, seed=seed + self.rows)
            keys, values = self.cache.update(keys / 100, values, 0)  # logits as they are in models
            out, _ = attention.attention(self.module, query, keys, values, self.mask(L, keys.shape[2]))
        given = [to_numpy(array) for array in (query, keys, values)]
        settings = self.cache.attn.parameters(Hq // HKV)
        score = {"component_score": self.cache.attn.component_score, "left_padding": self.first}
        return out.transpose(1, 2), oracle.sparq_attention(*given, **settings, **score, verify="sparse")

    def mask(self, L: int, S: int) -> torch.Tensor | None:
        """What transformers makes: of several queries always."""
        if L == 1 and self.first is None:
            return None
        valid = padded(*(self.first or (0,) * self.B), length=S)[:, None, None] > 0
        made = valid & torch.ones(L, S, dtype=torch.bool, device=DEVICE).tril(S - L)
        if L <= 16:
            setattr(made, padding._NAME, padding.Padding(made))
        return made


def assert_right(found: tuple[torch.Tensor, Array]) -> None:
    np.testing.assert_allclose(to_numpy(found[0]), found[1], rtol=0, atol=2e-5)


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("first", [None, (0, 17)], ids=["whole", "padded"])
@pytest.mark.usefixtures("guarded")
def test_calls_of_any_few_queries_are_those_of_the_oracle(name: str, first: tuple[int, ...] | None) -> None:
    call = Calls(SETTINGS[name], len(first or (0,)), first)
    call(62)  # the prompt; a group of keys is filled by a later call
    for L in (1, 4, 2, 1, 16):
        assert_right(call(L))
    assert call.cache.report.sparse_calls == 5


def covered(buffers: Any) -> set[int]:
    """How many rows each of what lies beside a cache covers."""
    lengths = [buffers.codes.length if buffers.codes else buffers.transposed]
    return {*lengths, *(kept.state.length for kept in (buffers.key_moments, buffers.value_moments) if kept)}


@pytest.mark.parametrize("name", SETTINGS)
def test_rows_that_may_be_taken_back_are_never_in_what_lies_beside_a_cache(name: str) -> None:
    call = Calls(SETTINGS[name])
    call(61)
    for L, taken_back in ((4, 3), (8, 0), (5, 2), (1, 0), (16, 15)):
        assert_right(call(L, seed=L))
        buffers, P = call.layer.buffers, call.rows - L + 1
        assert covered(buffers) == {P}
        call.cache.crop(-taken_back)
        call.rows -= taken_back
        assert covered(buffers) == {P}  # nothing had to be forgotten


def test_padding_of_a_call_is_read_once_and_none_is_none() -> None:
    """A decode step without padding has no mask, a call of several has one: codes and moments are not begun anew."""
    call = Calls(SETTINGS["16 bits, mixed"])
    call(40)
    call(1)
    moments = call.layer.buffers.value_moments
    call(4)
    call(1)
    assert call.layer.buffers.value_moments is moments


HOLES = torch.ones(4, 44, dtype=torch.bool, device=DEVICE).tril(40)
HOLES[:, 7] = False


@pytest.mark.parametrize(
    ("reason", "attn", "L", "Hq", "rows"),
    [
        (reasons.A_FEW, "sparq:rank=16,top_k=8,component_score=query", 4, 8, 40),
        (reasons.PROMPT, SETTINGS["16 bits"], 17, 8, 40),
        (reasons.PROMPT, SETTINGS["16 bits"], 16, 8, 0),
        (reasons.MANY_ROWS, SETTINGS["16 bits"], 16, 18, 40),
        ("over fewer than 13 keys", SETTINGS["16 bits"], 4, 8, 11),
    ],
)
def test_other_calls_are_dense_and_counted(reason: str, attn: str, L: int, Hq: int, rows: int) -> None:
    call = Calls(attn)
    if rows:
        call(rows)
        call.cache.report.dense_calls.clear()
    call.module.num_key_value_groups = Hq // HKV
    call(L, Hq)
    assert dict(call.cache.report.dense_calls) == {reason: 1}
    assert call.cache.report.sparse_calls == 0


@pytest.mark.parametrize(
    "mask",
    [HOLES, torch.ones_like(HOLES), torch.ones_like(HOLES).tril(39), torch.ones_like(HOLES).tril(40).triu(42)],
    ids=["holes", "not causal", "a key less", "nothing for the first query"],
)
def test_masks_that_are_not_left_padding_are_seen(mask: torch.Tensor) -> None:
    assert attention.Padding(mask[None, None]).first is None


def test_generation_with_drafts_checks_them_sparsely() -> None:
    hf.register()
    try:
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(
            config(num_hidden_layers=2, pad_token_id=0, bos_token_id=1, eos_token_id=2, initializer_range=0.3),
            attn_implementation="sparq",
        )
        model = model.to(DEVICE).eval()
        prompt = torch.arange(3, 43, device=DEVICE)[None]
        settings = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False}
        (attn,) = parse("sparq:rank=64,top_k=32,key_bits=16,verify=sparse,dense_below=0")
        cache = hf.SparQCache(model.config, attn)
        # Tokens repeat in the prompt, so that there are drafts of which most are wrong.
        prompt = prompt % 7 + 3
        out = model.generate(prompt, **settings, past_key_values=cache, prompt_lookup_num_tokens=3)
        assert out.shape == (1, 48)
        report = cache.report
        assert report.sparse_calls > 0
        assert not any("few queries" in reason for reason in report.dense_calls)
        assert cache.get_seq_length() == 47
    finally:
        for interface in (AttentionInterface, AttentionMaskInterface):
            interface._global_mapping.pop("sparq", None)
