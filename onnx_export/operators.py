"""What each operator takes and gives: one table, read by the ONNX checker, the model builder and the reference page."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from mlx_sparse.common.key_codes import GROUP

from .formal import Attribute, Operator, Tensor
from .table import OUTPUT, OWN, SAMPLE, WINDOW

# Functions that bodies call, no operators: they have no schema and no kernel of their own.
PROMPTS = "PromptAttention"
OWN_KEYS = "OwnKeys"
FUNCTIONS = (
    *(PROMPTS, OWN_KEYS, "SparQComponents", "SparQChoice", "CodeRanges", "KeyRows", "KeyBounds", "Pack", "Unpack"),
)
_WHEN_SAMPLED = (
    "Sampled are pieces of a prompt of more than `block_size` tokens, without padding and with rows of one length of "
    "`dense_prompt_below` keys or more"
)
_DENSE_PROMPT = Attribute(
    "dense_prompt_below",
    int,
    "Attend densely to prompts while the rows, the new tokens included, have fewer keys; 0 never does.",
    0,
)
# Before the names of operators over caches in few bits, and of functions that their bodies call.
PACKED = "Packed"
KV_BITS, KV_GROUP_SIZES = (8, 4), (32, 64, 128)
KV = (
    Attribute("kv_bits", int, "Bits of a component of a key or value.", choices=KV_BITS),
    Attribute("kv_group_size", int, "Components with one scale and one bias; D is a multiple.", choices=KV_GROUP_SIZES),
    Attribute(
        "kv_type",
        int,
        "Element type of scales and biases, to which what they make is rounded, by ONNX's number: 1 is float32, 10 "
        "float16, 16 bfloat16. Files have that of T.",
        choices=(1, 10, 16),
    ),
)


def coded_axes(capacity: int, key_bits: int) -> dict[str, int]:
    """Lengths of the axes that only codes have, in caches of ``capacity`` keys: groups, and bytes of a record."""
    return {"groups": -(-capacity // GROUP), "record": 4 + GROUP // 8 * key_bits}


def packed_row(D: int, *, kv_bits: int, kv_group_size: int, kv_type: int) -> int:
    """Bytes of a packed row of ``D`` components."""
    return D * kv_bits // 8 + D // kv_group_size * (8 if kv_type == 1 else 4)


def unpacked_row(row: int, *, kv_bits: int, kv_group_size: int, kv_type: int) -> int:
    """Components of a packed row of that many bytes."""
    return row * 8 * kv_group_size // (kv_bits * kv_group_size + (64 if kv_type == 1 else 32))


def _sampling(base: Operator) -> Operator:
    """The operator that attends by SampleAttention to pieces of prompts, and is ``base`` otherwise."""
    kept = tuple(attribute for attribute in base.attributes if attribute is not WINDOW)
    same = f"`{base.name}`" + (" with window 0" if WINDOW in base.attributes else "")
    return replace(
        base,
        name=f"Sample{base.name.removeprefix('Cached')}",
        doc=f"{same}, but `Sample` to some pieces of a prompt. {_WHEN_SAMPLED}.",
        attributes=(*kept, *SAMPLE[1:-1], _DENSE_PROMPT),
        base=base.name,
    )


def _packed(base: Operator) -> Operator:
    """The operator that keeps keys and values in few bits, and is ``base`` otherwise."""

    def packed(tensor: Tensor) -> Tensor:
        return replace(tensor, type="tensor(uint8)", axes="B Hkv C row") if tensor.as_keys else tensor

    return replace(
        base,
        name=PACKED + base.name,
        doc=f"`{base.name}` over packed rows, docs/spec/quantised.md: new rows are packed, and attended to as what "
        "they stand for then, as all others are.",
        attributes=(*base.attributes, *KV),
        inputs=tuple(map(packed, base.inputs)),
        outputs=tuple(map(packed, base.outputs)),
        base=base.name,
    )


# Whatever appends to caches and attends can sample prompts, and keep rows in few bits if it has no others like keys.
_PAIRS = {pair.name: pair for pair in map(_sampling, OWN.values()) if pair.states and pair.outputs[0] is OUTPUT}
_PLAIN = {**OWN, **_PAIRS}
_CACHED = [each for each in _PLAIN.values() if sum(state.as_keys for state in each.states.values()) == 2]
OPERATORS: Mapping[str, Operator] = {
    **_PLAIN,
    **{each.name: each for each in map(_packed, _CACHED) if each.outputs[0] is OUTPUT},
}
# States that a file cannot keep among its keys and values.
RECURRENT = sorted({name for each in OWN.values() for name, state in each.states.items() if not state.as_keys})
SAMPLING: Mapping[str, str] = {pair.base: name for name, pair in _PAIRS.items()}  # what also samples prompts
