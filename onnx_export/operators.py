"""List all operators in one table for the ONNX checker, the model builder and the reference page."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from mlx_sparse.methods.scoring_keys import GROUP

from .formal import Attribute, Operator
from .table import OUTPUT, OWN, SAMPLE, WINDOW

# Functions that bodies call, no operators: they have no schema and no kernel of their own.
PROMPTS = "PromptAttention"
FUNCTIONS = (PROMPTS, "SparQComponents", "SparQChoice", "KeyChunks", "IsStep", "Rows", "SaapAppend", "Saap")
_WHEN_SAMPLED = (
    "A chunk is sampled if it has more than `block_size` tokens and no padding, and if all rows have one length of "
    "`dense_prompt_below` keys or more"
)
_DENSE_PROMPT = Attribute(
    "dense_prompt_below",
    int,
    "Prefill is dense while the rows, with the new tokens, have fewer keys; with 0 it never is.",
    0,
)


CODE_RECORD = 36  # bytes of a component of a group of coded keys: lo, step and 64 codes of 4 bits


def coded_axes(capacity: int) -> dict[str, int]:
    """Return the lengths of the axes that only coded keys have, in caches of ``capacity`` keys."""
    return {"groups": -(-capacity // GROUP)}


def _sampling(base: Operator) -> Operator:
    """Return the operator that attends by SampleAttention to prefill chunks, and is ``base`` otherwise."""
    kept = tuple(attribute for attribute in base.attributes if attribute is not WINDOW)
    same = f"`{base.name}`" + (" with window 0" if WINDOW in base.attributes else "")
    return replace(
        base,
        name=f"Sample{base.name.removeprefix('Cached')}",
        doc=f"{same}, but `Sample` for some prefill chunks. {_WHEN_SAMPLED}.",
        attributes=(*kept, *SAMPLE[1:-1], _DENSE_PROMPT),
        base=base.name,
    )


# Whatever appends to caches and attends can sample prompts.
_PAIRS = {pair.name: pair for pair in map(_sampling, OWN.values()) if pair.states and pair.outputs[0] is OUTPUT}
OPERATORS: Mapping[str, Operator] = {**OWN, **_PAIRS}
# States that a file cannot keep among its keys and values.
RECURRENT = sorted({name for each in OWN.values() for name, state in each.states.items() if not state.as_keys})
SAMPLING: Mapping[str, str] = {pair.base: name for name, pair in _PAIRS.items()}  # what also samples prompts
