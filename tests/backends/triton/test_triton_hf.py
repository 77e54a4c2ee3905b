"""Test transformers models with ``attn_implementation="sparq"``: sparse calls, dense calls and the cache."""

from __future__ import annotations

import copy
import gc
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib import metadata
from typing import Any

import numpy as np
import pytest
import torch
from cache_rows import padded, states
from cases import Array
from json_tables import read_tables
from mlx_sparse.cuda_ref import hf, torch_functions
from mlx_sparse.cuda_ref.hf import attention
from mlx_sparse.cuda_ref.hf.buffers import Buffers
from mlx_sparse.cuda_ref.launchers import configs
from mlx_sparse.cuda_ref.launchers.sparq import sparq_attention
from tier import some
from torch_arrays import DEVICE
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.modeling_utils import AttentionInterface

from mlx_sparse import cuda_ref
from mlx_sparse.checks import BackendUnavailable, ConfigError
from mlx_sparse.core.base import Step
from mlx_sparse.core.decide import ENOUGH_SAVED
from mlx_sparse.methods import SparQ, parse

DATA = read_tables(__file__)

pytestmark = pytest.mark.slow  # models of transformers

SIZES = {"hidden_size": 96, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 64, "head_dim": 64}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
MODELS: dict[str, dict[str, Any]] = DATA["models"]
PROMPT = 40
CLOSE: dict[str, Any] = {"rtol": 1e-4, "atol": 1e-4}  # running statistics sum in another order


@pytest.fixture(scope="module", autouse=True)
def _registered() -> Iterator[None]:
    hf.register()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the models are tiny
    yield
    torch.set_num_threads(threads)
    for interface in (AttentionInterface, AttentionMaskInterface):
        for name in ("sparq", "reference"):
            interface._global_mapping.pop(name, None)


_models: dict[str, Any] = {}


def model(name: str) -> Any:
    """Return a tiny random model with peaked attention, so that the selection of keys matters."""
    if name not in _models:
        family = name.partition("-")[0]
        config = AutoConfig.for_model(
            family, pad_token_id=0, bos_token_id=1, eos_token_id=2, **{**SIZES, **HEADS, **MODELS[name]}
        )
        config.initializer_range = 0.3
        torch.manual_seed(0)
        _models[name] = AutoModelForCausalLM.from_config(config, attn_implementation="eager").to(DEVICE).eval()
        for parameter, data in _models[name].named_parameters():
            if parameter.endswith("sinks"):
                data.data += 30  # sinks must be as large as the logits to matter
    return _models[name]


def tokens(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).integers(3, SIZES["vocab_size"], shape)).to(DEVICE)


def decode(
    model: Any, implementation: str, cache: Any, prompt: torch.Tensor, then: torch.Tensor, mask: Any = None
) -> Array:
    """Return the logits after the prompt and after each token of ``then (B, n)``: ``(B, n + 1, vocabulary)``."""
    model.set_attn_implementation(implementation)
    logits = []
    with torch.no_grad():
        for ids in (prompt, *(then[:, i : i + 1] for i in range(then.shape[1]))):
            if mask is not None and cache.get_seq_length():
                mask = torch.cat([mask, torch.ones_like(mask[:, :1])], dim=1)
            logits.append(model(ids, attention_mask=mask, past_key_values=cache, logits_to_keep=1).logits)
    return torch.cat(logits, dim=1).cpu().numpy()


def reference(config: SparQ) -> str:
    """Register attention over a plain cache that recomputes the state of a `SparQCache` in every decode step.

    tests/core compares the numbers of single steps with the oracle.
    """

    def attend(module: Any, query: Any, key: Any, value: Any, mask: Any, scaling: Any = None, **kwargs: Any) -> Any:
        sinks, own = kwargs.get("s_aux"), kwargs.get("softcap") or kwargs.get("s_aux") is not None
        if query.shape[2] > 1 or key.shape[2] <= config.top_k or kwargs.get("sliding_window") or kwargs.get("softcap"):
            dense = attention._dense if own else sdpa_attention_forward
            return dense(module, query, key, value, mask, scaling=scaling, **kwargs)
        padding = None if mask is None else mask[:, 0, 0].int().argmax(dim=1).int()
        G, coded = query.shape[1] // key.shape[1], config.key_bits < 16
        of_model = config.for_model(qk_norm=hasattr(module, "q_norm"), grouped=G > 1)
        weight, keys_t = None, torch_functions.code_keys(key, padding) if coded else None
        if of_model.component_score == "query_key":
            given = (keys_t, key, padding) if coded else (key, padding)
            weight = (torch_functions.key_spread if coded else torch_functions.deviation)(*given)
        how = {"keys_t": keys_t, "component_weight": weight, "scale": scaling, "left_padding": padding}
        mean = torch_functions.masked_mean(value, padding)
        out, lse = sparq_attention(query, key, value, value_mean=mean, **how, **of_model.parameters(G))
        if sinks is not None:
            out = out / (1 + torch.exp(sinks.double()[:, None] - lse))[..., None]
        return out.to(query.dtype).transpose(1, 2), None

    AttentionInterface.register("reference", attend)
    AttentionMaskInterface.register("reference", sdpa_mask)
    return "reference"


def expected(name: str, attn: str, prompt: torch.Tensor, then: torch.Tensor, mask: Any = None) -> Array:
    """Return the logits with the attention of `reference`."""
    (config,) = parse(attn)
    assert isinstance(config, SparQ)
    return decode(model(name), reference(config), DynamicCache(config=model(name).config), prompt, then, mask)


def sparq_cache(name: str, attn: str | SparQ) -> hf.SparQCache:
    model(name).set_attn_implementation("sparq")
    return hf.SparQCache(model(name).config, attn)


STEPS = DATA["steps"]


@pytest.mark.parametrize(("name", "attn", "first"), some(STEPS, 4))
def test_decode_steps_match_recomputed_state(name: str, attn: str, first: tuple[int, ...] | None) -> None:
    B, n = len(first or (0,)), 2
    length = 126 if "key_bits" in attn else PROMPT  # the second step fills a group
    prompt, then, mask = tokens(B, length), tokens(B, n, seed=1), padded(*first, length=length) if first else None
    cache = sparq_cache(name, attn)
    got = decode(model(name), "sparq", cache, prompt, then, mask)
    wanted = expected(name, attn, prompt, then, mask)
    np.testing.assert_allclose(got, wanted, **CLOSE)
    assert cache.report.sparse_calls == n * cache.report.served_layers
    dense = decode(model(name), "eager", DynamicCache(config=model(name).config), prompt, then, mask)
    if cache.attn.top_k < PROMPT:
        assert not np.allclose(dense, wanted, **CLOSE)  # otherwise the comparison above would be empty


@pytest.mark.parametrize("name", [name for name in MODELS if "-" not in name])
def test_selecting_every_key_generates_dense_tokens(name: str) -> None:
    prompt, settings = tokens(1, PROMPT), {"max_new_tokens": 20, "min_new_tokens": 20, "do_sample": False}
    model(name).set_attn_implementation("eager")
    dense = model(name).generate(prompt, **settings)
    cache = sparq_cache(name, "sparq:top_k=60,dense_below=0")
    assert torch.equal(model(name).generate(prompt, **settings, past_key_values=cache), dense)
    assert cache.report.sparse_calls == 0


def test_cache_copies_are_independent() -> None:
    attn = "sparq:rank=16,top_k=12,component_score=query_key"
    prompt, cache = tokens(1, PROMPT), sparq_cache("llama", attn)
    with torch.inference_mode():
        model("llama")(prompt, past_key_values=cache)
        model("llama")(tokens(1, 1, seed=3), past_key_values=cache)  # builds the state of a SparQ step
    results = []
    for seed in (4, 5, 4):
        branch = copy.deepcopy(cache)
        results.append(decode(model("llama"), "sparq", branch, tokens(1, 1, seed=seed), tokens(1, 0)))
        assert branch.report.sparse_calls == 2 * cache.report.sparse_calls
    assert np.array_equal(results[0], results[2])
    assert not np.array_equal(results[0], results[1])
    assert cache.get_seq_length() == PROMPT + 1


def test_decode_state_is_freed() -> None:
    ours = {hf.SparQCache, Buffers, attention.Padding}

    def alive() -> int:
        return sum(type(thing) in ours for thing in gc.get_objects())

    gc.collect()
    gc.disable()  # objects in reference cycles would occupy GPU memory
    try:
        before = alive()
        decode(
            model("llama"),
            "sparq",
            sparq_cache("llama", "sparq:top_k=8"),
            tokens(2, PROMPT),
            tokens(2, 2),
            padded(0, 5, length=PROMPT),
        )
        assert alive() == before
    finally:
        gc.enable()


def call(
    name: str = "llama", attn: str = "sparq:rank=16,top_k=8", L: int = 1, cache: Any = None, **given: Any
) -> tuple[Any, Any]:
    """Run a prompt and one more call with ``given``; return the cache and the logits."""
    cache = cache or sparq_cache(name, attn)
    model(name).set_attn_implementation("sparq")
    B = given.pop("B", 1)
    with torch.no_grad():
        model(name)(tokens(B, PROMPT), past_key_values=cache)
        return cache, model(name)(tokens(B, L, seed=1), past_key_values=cache, **given).logits


def only(reports: Any) -> dict[str, int]:
    return {reason: count for reason, count in reports.dense_calls.items() if reason != "in prefill"}


HOLES = torch.ones(1, PROMPT + 1, dtype=torch.bool, device=DEVICE)
HOLES[:, 7] = False
OWN = HOLES[:, None, None]
DENSE: list[tuple[str, dict[str, Any]]] = [
    ("in multi-token decode (verification step or short prompt)", {"L": 4}),
    ("over fewer than 300 keys", {"attn": "sparq:rank=16,top_k=8,dense_below=300"}),
    ("over fewer than 2,048 keys", {"attn": "sparq:rank=16"}),
    ("with a custom attention mask", {"attention_mask": OWN}),
    ("with a mask that is not left padding", {"attention_mask": HOLES}),
    ("with soft-capped scores", {"name": "gemma2"}),
    ("with more than 16 query heads per KV head", {"name": "llama-many-heads"}),
    ("with attention sinks", {"name": "gpt_oss", "attn": "sparq:rank=16,top_k=8,reallocate=true"}),
]


@pytest.mark.parametrize(("reason", "given"), DENSE, ids=[reason for reason, _ in DENSE])
def test_unsupported_calls_are_dense_and_counted(reason: str, given: dict[str, Any]) -> None:
    cache, logits = call(**given)
    counts = only(cache.report)
    sliding = counts.pop("with a sliding window (DynamicSlidingWindowLayer)", 0)
    own = reason.endswith(("scores", "sinks"))  # sdpa cannot do this in prefill either
    prompts = 2 if own or "query heads" in reason else 1
    served = cache.report.served_layers
    assert (counts, sliding) == ({reason: prompts * served}, 2 * (2 - served))
    assert cache.report.sparse_calls == 0
    name = given.get("name", "llama")
    model(name).set_attn_implementation("eager" if own else "sdpa")
    plain = DynamicCache(config=model(name).config)
    with torch.no_grad():
        model(name)(tokens(1, PROMPT), past_key_values=plain)
        mask = {"attention_mask": HOLES} if "attention_mask" in given else {}
        dense = model(name)(tokens(1, given.get("L", 1), seed=1), past_key_values=plain, **mask).logits
    assert torch.equal(logits, dense)


def test_other_caches_are_dense_with_a_warning() -> None:
    attention._warn_once.cache_clear()
    with pytest.warns(UserWarning, match="past_key_values=SparQCache"):
        _, logits = call(cache=DynamicCache(config=model("llama").config))
    dense = decode(model("llama"), "sdpa", DynamicCache(), tokens(1, PROMPT), tokens(1, 1, seed=1))
    assert np.array_equal(logits.cpu().numpy()[:, -1:], dense[:, -1:])


def test_report_text() -> None:
    cache, _ = call("gemma3_text")
    lines = str(cache.report).splitlines()
    assert lines[0].startswith(
        "sparq:rank=16,top_k=8,reallocate=false,component_score=query_key on triton: 1 of 2 layers (gemma3_text"
    )
    assert lines[1] == "  dense layers: 1 with a sliding window (DynamicSlidingWindowLayer)"
    assert lines[2] == "  sparse at 9 keys and longer (given)"
    assert lines[3].startswith("  sparse calls: 1, ")
    assert "1 in prefill" in lines[4]


def test_changed_keys_are_not_the_cached_keys() -> None:
    cache, _ = call()
    module = model("llama").model.layers[1].self_attn
    query, (keys, values) = torch.ones(1, 4, 1, 64, device=DEVICE), cache.update(*states(1, 2, 1, D=64), 1)
    for changed in ((keys + 0, values), (keys[:, :, 1:], values[:, :, 1:])):
        attention.attention(module, query, *changed, None)
    assert cache.report.sparse_calls == 2
    attention.attention(module, query, keys, values + 0, None)
    assert only(cache.report) == {"with keys or values that differ from the KV cache": 1}
    attention.attention(module, query, keys, values, None)
    assert cache.report.sparse_calls == 3
    cache.update(*states(1, 2, 1, D=64), 1)  # keys and values are now one token short
    attention.attention(module, query, keys, values, None)
    assert only(cache.report) == {"with keys or values that differ from the KV cache": 2}


@pytest.mark.parametrize(("D", "reason"), [(32, "32, less than the rank"), (72, "72"), (20, "20"), (264, "264")])
def test_unsupported_head_dims_are_dense(D: int, reason: str) -> None:
    # Some configurations contain a wrong head dim, which the cache cannot detect.
    cache = sparq_cache("llama", "sparq:rank=64,top_k=8")
    rows = cache.update(*states(1, 2, PROMPT, D=D), 0)
    attention.attention(model("llama").model.layers[0].self_attn, torch.ones(1, 4, 1, D, device=DEVICE), *rows, None)
    fits = D == 72
    assert only(cache.report) == ({} if fits else {f"with a head dim of {reason}": 1})
    assert cache.report.sparse_calls == fits


def test_dropout_and_gradients_are_dense() -> None:
    cache, _ = call()
    module = model("llama").model.layers[1].self_attn
    query, (keys, values) = torch.ones(1, 4, 1, 64, device=DEVICE), cache.update(*states(1, 2, 1, D=64), 1)
    attention.attention(module, query, keys, values, None, dropout=0.5)
    attention.attention(module, query.requires_grad_(), keys, values, None)
    assert only(cache.report) == {"with dropout": 1, "with gradients": 1}


def test_gpu_kind_is_the_nearest_lower_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def kind(capability: int) -> str:
        monkeypatch.setattr(configs, "capability", lambda device: capability)
        return attention.gpu_kind(torch.device("cuda"))

    kinds = {75: "sm_80", 80: "sm_80", 89: "sm_80", 90: "sm_90", 100: "sm_100", 120: "sm_100"}
    assert {capability: kind(capability) for capability in kinds} == kinds
    assert set(kinds.values()) <= set(ENOUGH_SAVED)
    assert attention.gpu_kind(torch.device("cpu")) == ""


def test_threshold_comes_from_the_user_or_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    def crossovers(attn: str, G: int = 2, D: int = 64) -> list[str]:
        cache = sparq_cache("llama", attn)
        with torch.no_grad():
            rows = cache.update(*states(1, 2, 20, D=D), 0)
            module = torch.nn.Module()
            module.num_key_value_groups = G
            attention.attention(module, torch.ones(1, 2 * G, 1, D, device=DEVICE), *rows, None)
        return cache.report.crossovers()

    assert crossovers("sparq:rank=16,dense_below=300") == ["sparse at 300 keys and longer (given)"]
    assert crossovers("sparq:rank=16") == ["sparse at 2,048 keys and longer (modeled)"]
    monkeypatch.setattr(attention, "gpu_kind", lambda device: "sm_90")
    step = Step(2, 2, 64, 4, "sm_90")
    config = SparQ(rank=16, component_score="query_key", reallocate=False)
    assert crossovers("sparq:rank=16") == [f"sparse at {config.shortest_context(step):,} keys and longer (modeled)"]
    assert crossovers("sparq:rank=16,key_bits=16", G=16, D=16) == ["never sparse (modeled)"]


@pytest.mark.parametrize(("G", "score"), [(1, "query"), (2, "query_key")])
def test_component_score_depends_on_the_shapes_of_queries_and_keys(G: int, score: str) -> None:
    cache = sparq_cache("llama", "sparq:rank=16")
    with torch.no_grad():
        rows = cache.update(*states(1, 1, 9, D=64), 0)
        module = torch.nn.Module()  # gpt_bigcode has one KV head and no num_key_value_groups
        attention.attention(module, torch.ones(1, G, 1, 64, device=DEVICE), *rows, None)
    assert cache.attn.component_score == score


def _config(name: str = "llama", **changes: Any) -> Any:
    config = AutoConfig.for_model(name, **{**SIZES, **HEADS, **changes})
    config._attn_implementation = changes.get("attn_implementation", "sparq")
    return config


MISTAKES: dict[str, tuple[Callable[[], Any], str]] = {
    "method": (lambda: hf.SparQCache(_config(), "streaming"), "attn: expected sparq.* alone, got 'streaming'"),
    "methods": (lambda: hf.SparQCache(_config(), "sparq+streaming"), "attn: expected sparq.* alone, got 'sparq.str"),
    "key": (lambda: hf.SparQCache(_config(), "sparq:r=2"), "sparq: expected one of the keys rank"),
    "rank": (lambda: hf.SparQCache(_config(), "sparq:rank=65"), "rank: expected at most the head dim D=64, got 65"),
    "type": (lambda: hf.SparQCache(_config(), 3), "attn: expected sparq.* alone, got '3'"),  # type: ignore[arg-type]
    "model": (lambda: hf.SparQCache(model("llama")), "config: expected model.config .*, got LlamaForCausalLM"),
    "implementation": (
        lambda: hf.SparQCache(_config(attn_implementation="sdpa")),
        r"config: expected attn_implementation='sparq', got 'sdpa'. Call .*set_attn_implementation",
    ),
    "sliding": (
        lambda: hf.SparQCache(_config("mistral", sliding_window=16)),
        "config: expected a model with a full-attention layer, got mistral: 2 with a sliding window",
    ),
    "crop": (lambda: hf.SparQLayer().crop(3), "tokens_to_remove: expected 0 or less, got 3"),
    "offload": (lambda: hf.SparQLayer().offload(), "offloading: expected no call"),
    "gradients": (
        lambda: model("llama")(tokens(1, 4), past_key_values=sparq_cache("llama", "sparq")),
        "past_key_values: expected a call without gradients, .* torch.no_grad",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_refused(mistake: str) -> None:
    do, message = MISTAKES[mistake]
    with pytest.raises(ConfigError, match=f"^{message}") as raised:
        do()
    assert "\n" not in str(raised.value)


def test_register_needs_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for use in (hf.register, lambda: hf.SparQCache(_config())):
        with pytest.raises(BackendUnavailable, match=r"attn_implementation: expected .* torch finds no NVIDIA GPU"):
            use()


@pytest.mark.parametrize("version", ["none", "4.57.1", "5.16.2"])
def test_transformers_version_is_checked_on_use(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def installed(name: str) -> str:
        if version == "none":
            raise metadata.PackageNotFoundError
        return version

    monkeypatch.setattr(metadata, "version", installed)
    with pytest.raises(BackendUnavailable, match=f"^transformers: expected version 5.17 or newer, got {version}. Run"):
        _ = hf.SparQCache


def test_public_names_are_at_the_top() -> None:
    assert (cuda_ref.register, cuda_ref.SparQCache) == (hf.register, hf.SparQCache)


def test_transformers_is_imported_lazily() -> None:
    code = "import sys, mlx_sparse.cuda_ref.hf; print(*{'transformers', 'torch'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "\n"
