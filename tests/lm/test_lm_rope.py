"""Test pre-RoPE queries and keys: records, the inverse RoPE without records, and refused variants."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.models.rope_utils import initialize_rope
from tiny_models import FAMILIES, build, prompt_of

from mlx_sparse.core import reasons
from mlx_sparse.lm import rope as rope_module
from mlx_sparse.lm.rope import Recorder, Seen, Source, find_sources, inverse, irreversible, ropes, rotate, visit_calls

D = 64
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LONG = {
    "rope_type": "longrope",
    "original_max_position_embeddings": 64,
    "short_factor": [1.0] * 32,
    "long_factor": [1.0 + i / 8 for i in range(32)],
}
# By variant: dims, traditional, scaling.
VARIANTS: dict[str, tuple[int, bool, dict[str, Any] | None]] = {
    "default": (D, False, None),
    "traditional": (D, True, None),
    "partial": (32, False, None),
    "partial traditional": (32, True, None),
    "linear": (D, False, {"rope_type": "linear", "factor": 4.0}),
    "llama3": (D, False, {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 64}),
    "yarn": (D, False, YARN),
    "yarn with mscale": (32, False, {**YARN, "mscale": 1.0, "mscale_all_dim": 0.5}),
    "longrope": (D, False, LONG),
    "proportional": (D, False, {"rope_type": "proportional", "partial_rotary_factor": 0.5}),
    "mrope": (D, False, {"rope_type": "mrope", "mrope_section": [8, 12, 12]}),
    "dynamic": (D, False, {"rope_type": "dynamic", "factor": 2.0}),
}


def rope_of(variant: str) -> Any:
    dims, traditional, scaling = VARIANTS[variant]
    return initialize_rope(dims, 10000.0, traditional, scaling, max_position_embeddings=256)


def rows_of(*shape: int, dtype: mx.Dtype = mx.float32) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(3)).astype(dtype)


def largest_error(a: mx.array, b: mx.array) -> float:
    """Return the largest error relative to the largest number."""
    a, b = a.astype(mx.float32), b.astype(mx.float32)
    return float(mx.abs(a - b).max() / mx.abs(b).max())


@pytest.mark.parametrize("offset", [0, 1, 63, 300], ids=str)
@pytest.mark.parametrize("variant", VARIANTS)
def test_inverse_of_every_variant_restores_the_rows(variant: str, offset: int):
    rope, rows = rope_of(variant), rows_of(2, 3, 40, D)
    rotated = rotate(rope, rows, offset)
    assert offset == 0 or largest_error(rotated, rows) > 0.1
    assert largest_error(inverse(rope, rotated, offset), rows) <= 1e-6


@pytest.mark.parametrize("variant", [name for name in VARIANTS if name != "dynamic"])
def test_inverse_works_in_chunks_and_per_sequence_positions(variant: str):
    rope, rows, offsets = rope_of(variant), rows_of(2, 3, 40, D), mx.array([7, 90])
    rotated = rotate(rope, rows, offsets)
    back = [inverse(rope, rotated[:, :, start : start + 10], offsets + start) for start in range(0, 40, 10)]
    assert largest_error(mx.concatenate(back, axis=2), rows) <= 1e-6


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16], ids=["f16", "bf16"])
@pytest.mark.parametrize("variant", ["default", "yarn with mscale", "longrope"])
def test_inverse_in_half_precision_is_exact_to_rounding(variant: str, dtype: mx.Dtype):
    rope, rows = rope_of(variant), rows_of(1, 2, 40, D, dtype=dtype)
    back = inverse(rope, rotate(rope, rows, 20), 20)
    assert back.dtype == dtype
    # Rounding of the scale, the RoPE and the inverse RoPE.
    assert largest_error(back, rows) <= 3 / 2 * float(mx.finfo(dtype).eps)


@pytest.mark.parametrize("variant", VARIANTS)
def test_only_a_rope_that_depends_on_the_length_is_irreversible(variant: str):
    expected = reasons.ROPE_BY_LENGTH if variant == "dynamic" else None
    assert irreversible(rope_of(variant), D) == expected


def test_a_rope_that_is_no_rotation_is_irreversible():
    class RoPEWithBias(type(rope_of("default"))):  # type: ignore[misc]
        def __call__(self, x: mx.array, offset: int = 0) -> mx.array:
            return super().__call__(x, offset=offset) + 1.0

    assert irreversible(RoPEWithBias(D), D) == reasons.ROPE_NOT_INVERTIBLE


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 64}
# Family and changes.
MODELS: list[tuple[str, dict[str, Any]]] = [
    *((family, {}) for family in FAMILIES),
    ("llama", {"rope_scaling": LLAMA3}),
    ("llama", {"rope_traditional": True}),
    ("qwen2", {"rope_scaling": YARN}),
    ("phi3", {"rope_scaling": {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [1.5] * 8},
              "original_max_position_embeddings": 64}),
    ("internlm2", {"rope_scaling": {"type": "dynamic", "factor": 2.0}, "max_position_embeddings": 16}),
    ("internlm3", {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}, "max_position_embeddings": 16,
                   "qkv_bias": False, "bias": False}),
    *((family, {}) for family in ("cohere2", "starcoder2", "nemotron", "gpt2")),
]  # fmt: skip


def seen_before_rope(model: Any, chunks: tuple[int, ...]) -> tuple[list[tuple[Seen, Any, Any]], list[Any]]:
    """Return all attention calls of prefill in chunks with their pre-RoPE queries and keys, and the caches."""
    sources, caches, calls = find_sources(model), make_prompt_cache(model), []
    with Recorder(model) as recorder:

        def visit(seen: Seen) -> None:
            source = sources[seen.layer]
            assert isinstance(source, Source)
            assert seen.keys is not None
            before = [source.pre_rope(recorder, rows, seen.position) for rows in (seen.queries, seen.keys)]
            calls.append((seen, *before))

        prompt = prompt_of(sum(chunks))
        for start, length in zip(range(0, 100, chunks[0]), chunks, strict=False):
            mx.eval(visit_calls(model, mx.array([prompt[start : start + length]]), caches, visit, recorder))
    return calls, caches


@pytest.mark.parametrize(
    ("family", "changes"), MODELS, ids=[f"{family} {' '.join(changes)}" for family, changes in MODELS]
)
def test_pre_rope_queries_and_keys_are_recorded(family: str, changes: dict[str, Any]):
    model = build(family, **changes)
    calls, caches = seen_before_rope(model, (20, 20, 1))
    sources = find_sources(model)
    assert {seen.layer for seen, *_ in calls} == set(range(len(caches)))
    for seen, queries, keys in calls:
        source = sources[seen.layer]
        assert isinstance(source, Source)
        for before, after in ((queries, seen.queries), (keys, seen.keys)):
            assert before.shape == after.shape
            if source.rope is None:
                assert before is after
            else:
                # The model's RoPE of these rows equals the attended rows, up to a factor per row.
                rotated = rotate(source.rope, before, seen.position)
                assert largest_error(rotated, after) <= 1e-6
                assert seen.position == 0 or largest_error(before, after) > 0.05


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16], ids=["f16", "bf16"])
def test_half_precision_separates_a_scale_from_a_norm(dtype: mx.Dtype):
    scaled, normed = build("ministral3"), build("hunyuan_v1_dense")
    for model in (scaled, normed):
        model.set_dtype(dtype)
    assert all(isinstance(source, Source) for source in find_sources(scaled).values())
    assert set(find_sources(normed).values()) == {reasons.CHANGED_AFTER_ROPE}


def test_a_norm_after_rope_is_refused_by_name():
    assert set(find_sources(build("hunyuan_v1_dense")).values()) == {reasons.CHANGED_AFTER_ROPE}
    # SAAP supports the same family without the norm.
    without = find_sources(build("hunyuan_v1_dense", use_qk_norm=False))
    assert all(isinstance(source, Source) and source.irreversible is None for source in without.values())


def test_a_rope_that_is_a_function_is_refused_by_name():
    assert set(find_sources(build("nanochat")).values()) == {reasons.ROPE_NOT_A_MODULE}


def test_layers_that_call_no_rope_have_no_source_rope():
    full = find_sources(build("cohere2"))[1]
    assert isinstance(full, Source)
    assert full.rope is None
    assert len(ropes(build("cohere2"))) == 2


def test_scale_after_rope_is_kept_by_the_inverse():
    model = build("ministral3")
    caches, sources, checked = make_prompt_cache(model), find_sources(model), 0
    with Recorder(model) as recorder:

        def visit(seen: Seen) -> None:
            nonlocal checked
            source, call = sources[seen.layer], recorder.calls[0]
            assert isinstance(source, Source)
            assert call.after is not seen.queries
            before = source.pre_rope(recorder, seen.queries, seen.position)
            assert before is not None
            scale = seen.queries / call.after
            assert largest_error(before, call.before * scale.mean(axis=-1, keepdims=True)) <= 1e-6
            checked += 1

        visit_calls(model, mx.array([prompt_of(100)]), caches, visit, recorder)
    assert checked == 2


def test_dynamic_variant_is_known_only_if_recorded():
    model = build("internlm2", rope_scaling={"type": "dynamic", "factor": 2.0}, max_position_embeddings=16)
    source = find_sources(model)[0]
    assert isinstance(source, Source)
    assert source.irreversible == reasons.ROPE_BY_LENGTH
    with Recorder(model) as recorder:
        rows = rows_of(1, 2, 30, 16)
        rotated = source.rope(rows, offset=4)
        assert source.pre_rope(recorder, rotated + 0, 4) is None
        assert source.pre_rope(recorder, rotated, 4) is rows


def test_records_are_freed_after_use():
    model = build("llama")
    rope = ropes(model)[0]
    with Recorder(model) as recorder:
        rows = rows_of(1, 2, 4, 16)
        rotated = rope(rows, offset=1)
        alive = weakref.ref(recorder.calls[0])
        assert recorder.input_of(rotated) is rows
        assert recorder.input_of(rotated) is None
        gc.collect()
        assert alive() is None
        rope(rows)
        recorder.clear()
        assert not recorder.calls
        for _ in range(100):
            rope(rows)
        assert len(recorder.calls) == rope_module.RECORDED
    assert not recorder.calls
    assert type(rope).__mro__[1].__name__ == "Module", "the original class of the rope is restored"
    rope(rows)
    assert not recorder.calls


def test_two_recorders_of_one_model_are_independent():
    model = build("llama")
    rope, rows = ropes(model)[0], rows_of(1, 2, 4, 16)
    with Recorder(model) as outer:
        with Recorder(model) as inner:
            rotated = rope(rows)
        assert not inner.calls
        assert outer.input_of(rotated) is rows
        assert outer.input_of(rope(rows)) is rows


def test_a_copy_of_a_recorded_model_is_not_recorded():
    model = build("llama")
    with Recorder(model) as recorder:
        other = copy.deepcopy(model)
        ropes(other)[0](rows_of(1, 2, 4, 16))
        assert not recorder.calls
        assert type(ropes(other)[0]) is type(rope_of("default"))
