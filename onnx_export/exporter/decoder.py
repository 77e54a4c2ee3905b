"""Build the ONNX graph of a decoder-only language model from mlx-lm's modules.

The graph computes in float32, but rounds the inputs of attention nodes to the type of the caches. Each row of the batch
is a left-padded sequence. ``past_length`` is the number of tokens of each row in the caches, padding included.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from onnx import TensorProto

from mlx_sparse.methods import Sample

from .. import build
from ..domain import Tensor
from ..operators import OPERATORS, SAMPLING, coded_axes
from .families import Family, Rope, head_dim, rope_of, window_of
from .graph import Graph
from .methods import EXACT, sample
from .methods.base import Decoding
from .weights import Weights

if TYPE_CHECKING:
    from mlx import nn

FLOAT, INT64 = TensorProto.FLOAT, TensorProto.INT64
CONV = Tensor("conv", "tensor(float)", "B 1 1", "Unused. onnxruntime-genai requires two further states or none.")


@dataclass(frozen=True)
class Target:
    """Settings of an exported file.

    Attributes:
        prompts: prefill method, with every "auto" resolved; None if prefill is dense.
        lanes: number of keys per chunk of component-major keys.
        dtype: type of the caches and of unquantized weights.
        dequantize: True to dequantize quantized weights and store them in ``dtype``.
        genai: True to name and arrange the caches as onnxruntime-genai expects.
    """

    decode: Decoding
    max_length: int
    lanes: int
    dtype: str
    dequantize: bool = False
    genai: bool = True
    prompts: Sample | None = None

    @property
    def text(self) -> str:
        """Return the prefill and decode methods as text, such as "sample+sparq"."""
        if self.prompts is None:
            return self.decode.text
        return str(self.prompts) if self.decode == EXACT else f"{self.prompts}+{self.decode.text}"

    def attributes(self, decode: Decoding, *, sampled: bool) -> dict[str, float]:
        """Return the attributes of a layer's attention node except ``scale`` and ``window``.

        ``decode`` is the decode method of the layer. Set ``sampled`` if the layer uses SampleAttention for prefill.
        """
        prompts = sample.attributes(self.prompts) if sampled and self.prompts else {}
        return {**decode.attributes(self.lanes), **prompts}

    def shortened(self) -> Target:
        """Return settings for verification, which make attention sparse even for short prompts."""
        prompts = self.prompts and sample.shortened(self.prompts)
        decode = self.decode.shortened()
        return replace(self, decode=decode, prompts=prompts)

    @property
    def capacity(self) -> int:
        """Capacity of the caches in tokens, a multiple of ``lanes``."""
        return -(-self.max_length // self.lanes) * self.lanes


def output_of(layer: int) -> str:
    """Return the name of a layer's output in the graph."""
    return f"layers.{layer}/output"


class Decoder:
    """Builder that adds the nodes and weights of one model to a graph.

    Args:
        family: properties of the model that cannot be read from its modules.
        target: settings of the file.
        written: callback that receives the name of each mlx-lm parameter when the parameter is written.
    """

    def __init__(
        self, model: nn.Module, family: Family, target: Target, graph: Graph, written: Callable[[str], None]
    ) -> None:
        self.model, self.family, self.target, self.g = model, family, target, graph
        self.weights = Weights(graph, target.dtype, dequantize=target.dequantize, written=written)
        self._virtual = 0  # number of states in virtual layers after the last layer
        self._sizes: dict[str | int, str | int] = {}
        self._angles: dict[Rope, tuple[str, str]] = {}

    def add(self) -> None:
        """Add the inputs, the layers and the outputs of the model to the graph."""
        g, inner = self.g, self.model.model
        ids = g.input("input_ids", INT64, ["batch", "length"])
        g.output("logits", FLOAT, ["batch", 1, int(inner.embed_tokens.weight.shape[0])])
        self._add_positions(ids)
        h, head = self.weights.embedding("model.embed_tokens", inner.embed_tokens, ids)
        scale = self.family.embedding_scale(self.model.args)
        if scale != 1:
            h = g.op("Mul", h, g.constant(scale, np.float32))
        for i, layer in enumerate(inner.layers):
            g.scope = f"layers.{i}/"
            h = self._layer(i, layer, h)
        self._fill_last_virtual_layer()
        g.scope = ""
        last = g.op("Gather", h, g.constant([-1]), axis=1)
        last = self._norm("model.norm", inner.norm, last)
        tied = "lm_head" not in self.model
        logits = head(last) if tied else self.weights.linear("lm_head", self.model.lm_head, last)
        g.op("Identity", logits, output="logits")

    def _add_positions(self, ids: str) -> None:
        """Add nodes that compute each row's padding and past length, and the positions (B, L, 1) of the new tokens."""
        g = self.g
        mask = g.input("attention_mask", INT64, ["batch", "total"])
        ones = g.op("Cast", mask, to=FLOAT)  # some runtimes have no ArgMax of int64
        first = g.op("ArgMax", ones, axis=1, keepdims=0)
        last = g.op("ArgMax", ones, axis=1, keepdims=0, select_last_index=1)
        tokens = g.op("ReduceSum", mask, g.constant([1]), keepdims=0)
        length = g.op("Shape", ids, start=1, end=2)
        # If a row is only padding, its new tokens are written to the first slots, and no key is valid.
        empty = g.op("Equal", tokens, g.constant(0))
        self.padding = g.op("Where", empty, length, first)
        past_tokens = g.op("Sub", tokens, length)
        past_length = g.op("Add", self.padding, past_tokens)
        # If the mask has a hole or is shorter than the new tokens, set past_length out of range, so that append fails.
        end = g.op("Add", last, g.constant(1))
        whole = g.op("Or", empty, g.op("Equal", g.op("Sub", end, self.padding), tokens))
        enough = g.op("GreaterOrEqual", past_length, g.constant(0))
        nowhere = g.constant(self.target.capacity)
        self.past_length = g.op("Where", g.op("And", whole, enough), past_length, nowhere)
        step = g.op("Range", g.constant(0), g.op("Squeeze", length), g.constant(1))
        positions = g.op("Add", g.op("Unsqueeze", past_tokens, g.constant([1])), step)
        self.positions = g.op("Unsqueeze", g.op("Cast", positions, to=FLOAT), g.constant([2]))

    def _layer(self, i: int, layer: nn.Module, h: str) -> str:
        name, family = f"model.layers.{i}", self.family

        def normed(which: str | None, x: str) -> str:
            return self._norm(f"{name}.{which}", layer[which], x) if which else x

        attended = self._attention(i, layer, normed("input_layernorm", h))
        h = self.g.op("Add", h, normed(family.after_attention, attended))
        made = self._mlp(f"{name}.mlp", layer.mlp, normed(family.before_mlp, h))
        return self.g.op("Add", h, normed(family.after_mlp, made), output=output_of(i))

    def _norm(self, name: str, module: nn.Module, x: str) -> str:
        """Add RMSNorm over the last axis, in a form that ONNX Runtime fuses into one node."""
        g = self.g
        square = g.op("Pow", x, g.constant(2.0, np.float32))
        mean = g.op("ReduceMean", square, g.constant([-1]), keepdims=1)
        root = g.op("Sqrt", g.op("Add", mean, g.constant(module.eps, np.float32)))
        weight = self.weights.vector(f"{name}.weight", module.weight, self.family.norm_shift)
        return g.op("Mul", g.op("Div", x, root), weight)

    def _mlp(self, name: str, mlp: nn.Module, x: str) -> str:
        g = self.g
        if "gate_up_proj" in mlp:
            both = self.weights.linear(f"{name}.gate_up_proj", mlp.gate_up_proj, x)
            half = mlp.gate_up_proj.weight.shape[0] // 2
            gate, up = g.split(both, [half, half])
        else:
            gate = self.weights.linear(f"{name}.gate_proj", mlp.gate_proj, x)
            up = self.weights.linear(f"{name}.up_proj", mlp.up_proj, x)
        gated = g.op("Mul", getattr(self, f"_{self.family.activation}")(gate), up)
        return self.weights.linear(f"{name}.down_proj", mlp.down_proj, gated)

    def _silu(self, x: str) -> str:
        return self.g.op("Mul", x, self.g.op("Sigmoid", x))

    def _gelu(self, x: str) -> str:
        g = self.g
        erf = g.op("Erf", g.op("Div", x, g.constant(2**0.5, np.float32)))
        half = g.op("Mul", x, g.op("Add", erf, g.constant(1, np.float32)))
        return g.op("Mul", half, g.constant(0.5, np.float32))

    def _gelu_tanh(self, x: str) -> str:
        g = self.g
        cube = g.op("Mul", g.op("Pow", x, g.constant(3.0, np.float32)), g.constant(0.044715, np.float32))
        inner = g.op("Mul", g.op("Add", x, cube), g.constant((2 / np.pi) ** 0.5, np.float32))
        half = g.op("Mul", x, g.op("Add", g.op("Tanh", inner), g.constant(1, np.float32)))
        return g.op("Mul", half, g.constant(0.5, np.float32))

    def _attention(self, i: int, layer: nn.Module, x: str) -> str:
        g, attention = self.g, layer.self_attn
        name = f"model.layers.{i}.self_attn"
        Hq, Hkv, D = attention.n_heads, attention.n_kv_heads, head_dim(attention)
        if "qkv_proj" in attention:
            parts = g.split(self.weights.linear(f"{name}.qkv_proj", attention.qkv_proj, x), [Hq * D, Hkv * D, Hkv * D])
        else:
            parts = [self.weights.linear(f"{name}.{p}_proj", attention[f"{p}_proj"], x) for p in "qkv"]
        q, k, v = (
            g.op("Reshape", part, g.constant([0, 0, heads, D]))
            for part, heads in zip(parts, (Hq, Hkv, Hkv), strict=True)
        )
        if "q_norm" in attention:
            q = self._norm(f"{name}.q_norm", attention.q_norm, q)
            k = self._norm(f"{name}.k_norm", attention.k_norm, k)
        rope, before = rope_of(attention.rope), [q, k]
        if rope is not None:
            q, k = self._rotated(rope, q, D), self._rotated(rope, k, D)
        window = window_of(layer, self.model)
        decode = EXACT if window or not self.target.decode.supports(i) else self.target.decode
        taken = {"query": q, "key": k, "value": v, **decode.routing(before, [q, k])}
        values = {name: self._stored(g.op("Transpose", part, perm=[0, 2, 1, 3])) for name, part in taken.items()}
        out = self._attend(i, decode, values, (Hkv, D), float(attention.scale), window)
        if self.target.dtype != "float32":
            out = g.op("Cast", out, to=FLOAT)
        flat = g.op("Reshape", g.op("Transpose", out, perm=[0, 2, 1, 3]), g.constant([0, 0, Hq * D]))
        return self.weights.linear(f"{name}.o_proj", attention.o_proj, flat)

    def _stored(self, value: str) -> str:
        """Cast ``value`` to the type of the caches, unless this type is float32. Return the name of the result."""
        dtype = self.target.dtype
        return value if dtype == "float32" else self.g.op("Cast", value, to=build.TYPES[dtype])

    def _rotated(self, rope: Rope, x: str, D: int) -> str:
        """Add nodes that apply RoPE to queries or keys ``x`` (B, L, H, D)."""
        g = self.g
        cos, sin = self._angle(rope)
        pairs = len(rope.frequencies)
        kept = []
        if 2 * pairs < D:
            x, *kept = g.split(x, [2 * pairs, D - 2 * pairs])
        if rope.traditional:
            paired = g.op("Reshape", x, g.constant([0, 0, 0, pairs, 2]))
            first, second = (g.op("Squeeze", half, g.constant([4])) for half in g.split(paired, [1, 1]))
        else:
            first, second = g.split(x, [pairs, pairs])
        rotated = [
            g.op("Sub", g.op("Mul", first, cos), g.op("Mul", second, sin)),
            g.op("Add", g.op("Mul", first, sin), g.op("Mul", second, cos)),
        ]
        if rope.traditional:
            last = [g.op("Unsqueeze", half, g.constant([4])) for half in rotated]
            rotated = [g.op("Reshape", g.op("Concat", *last, axis=4), g.constant([0, 0, 0, 2 * pairs]))]
        return g.op("Concat", *rotated, *kept, axis=3) if len(rotated + kept) > 1 else rotated[0]

    def _angle(self, rope: Rope) -> tuple[str, str]:
        """Return the names of the cosine and sine (B, L, 1, pairs) of ``rope``. Layers with equal RoPE share nodes."""
        if rope not in self._angles:
            g = self.g
            scope, g.scope = g.scope, f"rope.{len(self._angles)}/"
            positions = self.positions
            if rope.scale != 1:
                positions = g.op("Mul", positions, g.constant(rope.scale, np.float32))
            angle = g.op("Mul", positions, g.constant(rope.frequencies, np.float32))
            angle = g.op("Unsqueeze", angle, g.constant([2]))
            both = [g.op("Cos", angle), g.op("Sin", angle)]
            if rope.factor != 1:
                both = [g.op("Mul", value, g.constant(rope.factor, np.float32)) for value in both]
            self._angles[rope] = both[0], both[1]
            g.scope = scope
        return self._angles[rope]

    def _attend(
        self, i: int, decode: Decoding, values: dict[str, str], sizes: tuple[int, int], scale: float, window: int
    ) -> str:
        """Add the attention node of layer ``i`` with its caches. Return the name of its output (B, Hq, L, D).

        ``values`` maps the node's input names to value names in the graph. ``sizes`` are the number of KV heads and the
        head dim.
        """
        g, capacity = self.g, self.target.capacity
        sampled = self.target.prompts is not None and not window
        name = SAMPLING[decode.operator] if sampled else decode.operator
        operator = OPERATORS[name]
        attributes = {**self.target.attributes(decode, sampled=sampled), "scale": scale}
        if "window" in operator.attribute_names:
            attributes["window"] = window
        self._sizes = {"B": "batch", "Hkv": sizes[0], "C": capacity, "D": sizes[1]}
        self._sizes |= {"3Hkv": 3 * sizes[0], "HkvD": sizes[0] * sizes[1]}
        self._sizes.update(coded_axes(capacity))
        outputs = {"output": f"{g.scope}attended"}
        states = operator.states
        for name in sorted(states, key=lambda name: name not in ("key", "value")):
            values[f"past_{name}"], outputs[f"present_{name}"] = self._state(i, name, states[name])
        if self.target.genai and sum(not state.as_keys for state in states.values()) == 1:
            past, present = self._state(i, "conv", CONV)
            g.op("Identity", past, output=present)
        values |= {"past_length": self.past_length, "left_padding": self.padding, **decode.weights(g, i, scale)}
        taken = [values[tensor.name] for tensor in operator.inputs]
        given = [outputs[tensor.name] for tensor in operator.outputs]
        g.add(build.node(operator.name, taken, given, **attributes))
        return outputs["output"]

    def _state(self, i: int, name: str, state: Tensor) -> tuple[str, str]:
        """Add the graph input and output of one state (cache) of layer ``i`` and return their names.

        onnxruntime-genai accepts one key cache and one value cache per layer. Other states that have the axes of keys
        are therefore named as keys and values of virtual layers, which follow the last layer.
        """
        past, present, place = f"past_{name}", f"present_{name}", str(i)
        if state.as_keys:
            past, present, place = "past_key_values", "present", f"{i}.{name}"
            if name not in ("key", "value"):
                layer, odd = divmod(self._virtual, 2)
                place = f"{len(self.model.layers) + layer}.{'value' if odd else 'key'}"
                self._virtual += 1
        element = build.element(state.type, T=self.target.dtype)
        dims = [self._sizes.get(axis, axis) for axis in state.dims]
        return self.g.input(f"{past}.{place}", element, dims), self.g.output(f"{present}.{place}", element, dims)

    def _fill_last_virtual_layer(self) -> None:
        """Add unused values to the last virtual layer if it has only keys, because genai requires keys and values."""
        if self.target.genai and self._virtual % 2:
            past, present = self._state(0, "none", OPERATORS["Append"].states["key"])
            self.g.op("Identity", past, output=present)
