"""What `roofline_machines.py` models: machines, links, models, ways to share them out, and the time per token of each.

Bytes are read at the memory's bandwidth, messages wait for each other, and the rest is left out: see there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from mlx_sparse.common.shares import Shares
from mlx_sparse.common.stats import dense_elements
from mlx_sparse.methods import Method
from mlx_sparse.tools.bench.core import Shape

ITEM = 2  # bytes of an element of keys, values and hidden states
FLOAT = 4  # of what is merged
WEIGHT = 4.5 / 8  # of a weight: 4 bits, and its share of a scale and a bias of 16 for groups of 64

USABLE = 0.75  # of the memory, which macOS lets the GPU have

MACHINES = (2, 4)
CONTEXTS = (8192, 32_768, 131_072, 524_288)
LENGTHS = tuple(range(1024, 65_536, 1024)) + tuple(range(65_536, (1 << 20) + 1, 8192))

Bracket = tuple[float, float]  # milliseconds, best and worst
END = {"best": 0, "worst": 1}


@dataclass(frozen=True)
class Chip:
    """A chip with Thunderbolt 5 as Apple publishes it, with the memory of a machine that is sold with it.

    Attributes:
        bandwidth: bytes per second.
        memory: bytes.
    """

    name: str
    bandwidth: float
    memory: float


CHIPS = (
    Chip("M4 Pro, 64 GB", 273e9, 64e9),
    Chip("M4 Max, 128 GB", 546e9, 128e9),
    Chip("M3 Ultra, 256 GB", 819e9, 256e9),
)
SHOWN = CHIPS[1]


@dataclass(frozen=True)
class Message:
    """Collectives of one kind in a decode step.

    Attributes:
        collective: "sum" (all-reduce), "gather" (all-gather) or "send".
        nbytes: of the array that is summed or sent, or that each machine gives to be gathered.
        times: how often.
    """

    collective: str
    nbytes: int
    times: int


@dataclass(frozen=True)
class Link:
    """What is published of a backend of MLX over Thunderbolt, best and worst.

    Attributes:
        mesh: whether every pair of machines has a cable of its own; a ring otherwise.
        latency: seconds of a step.
        bandwidth: bytes per second of a cable.
    """

    name: str
    mesh: bool
    latency: Bracket
    bandwidth: Bracket

    def steps(self, collective: str, machines: int) -> int:
        """Messages of a collective that wait for each other."""
        if self.mesh or collective == "send":
            return 1
        return (machines - 1) * (2 if collective == "sum" else 1)

    def sent(self, message: Message, machines: int) -> float:
        """Bytes that a machine sends over one cable."""
        parts = machines if message.collective == "sum" and not self.mesh else 1
        return message.nbytes * self.steps(message.collective, machines) / parts


RING = Link("ring (TCP)", False, (170e-6, 475e-6), (7e9, 1.25e9))
JACCL = Link("JACCL (RDMA)", True, (20e-6, 50e-6), (6.5e9, 3.5e9))
LINKS = (RING, JACCL)


@dataclass(frozen=True)
class Model:
    """The sizes of a model with weights of 4 bits and the same attention in all layers.

    Attributes:
        units: hidden units of an MLP, or of an expert.
        experts, active: how many a layer has, and how many of them a token uses.
        shared: experts that all tokens use besides.
    """

    name: str
    layers: int
    hidden: int
    shape: Shape
    units: int
    vocabulary: int
    experts: int = 1
    active: int = 1
    shared: int = 0

    def weights(self, share: int, *, held: bool) -> float:
        """Bytes that a machine holds, or reads for a token, of layers that ``share`` machines divide.

        mlx-lm divides attention and MLPs; routers, the embedding and the output matrix are whole on every machine.
        """
        attention = 2 * self.shape.D * (self.shape.Hq + self.shape.Hkv)
        experts = (self.experts if held else self.active) + self.shared
        divided = self.layers * self.hidden * (attention + 3 * self.units * experts)
        routers = self.layers * self.experts if self.experts > 1 else 0
        return WEIGHT * (divided / share + self.hidden * (routers + self.vocabulary * (2 if held else 1)))


MODELS = (
    Model("Llama-3.1-8B", 32, 4096, Shape(32, 8, 128), 14_336, 128_256),
    Model("Qwen3-30B-A3B", 48, 2048, Shape(32, 4, 128), 768, 151_936, experts=128, active=8),
    Model("Llama-3.3-70B", 80, 8192, Shape(64, 8, 128), 28_672, 128_256),
)

# What others measured with JACCL on one, two and four M3 Ultra, tokens per second over some 300 keys (exo #1780).
SCOUT = Model("Llama 4 Scout", 48, 5120, Shape(40, 8, 128), 8192, 202_048, experts=16, active=1, shared=1)
MEASURED = {1: 46.7, 2: 58.2, 4: 69.7}
MEASURED_AT = 319


@dataclass(frozen=True)
class Way:
    """How a token is computed.

    Attributes:
        sharing: "one" machine, or what several divide: "tensor", "pipeline" or "context".
        config: the method; None for dense attention.
        exact: whether machines that divide the context choose together, as one would.
    """

    sharing: str
    config: Method | None = None
    exact: bool = False

    @property
    def name(self) -> str:
        if self.sharing != "context" or self.config is None:
            return f"{self.sharing}, {self.config.name if self.config else 'dense'}"
        return f"context, {self.config.name} {'exact' if self.exact else 'local'}"


# Floats that each machine gives to further all-gathers of a layer, one number each, so that all choose as one would.
EXACT: dict[str, Callable[[Shape, Any], list[int]]] = {
    "sparq": lambda shape, config: [shape.Hq, shape.Hkv * config.top_k],  # log-sum-exp of the scores; candidates
    "quest": lambda shape, config: [shape.Hkv * (config.attended // config.page_size)],  # pages are the candidates
}


def messages(model: Model, way: Way, machines: int) -> list[Message]:
    """What machines send each other in a decode step."""
    shape, hidden = model.shape, ITEM * model.hidden
    if way.sharing == "tensor":
        return [Message("sum", hidden, 2 * model.layers)]
    if way.sharing == "pipeline":
        return [Message("send", hidden, machines - 1), Message("gather", hidden, 1)]
    if way.sharing == "one":
        return []
    gathered = [shape.Hq * (shape.D + 1)]  # output and log-sum-exp
    if way.exact and way.config is not None:
        gathered += EXACT[way.config.name](shape, way.config)
    return [Message("gather", FLOAT * floats, model.layers) for floats in gathered]


def wire(link: Link, model: Model, way: Way, machines: int) -> tuple[int, int, float]:
    """Collectives of a decode step, their steps, and the bytes that a machine sends over one cable."""
    found = messages(model, way, machines)
    steps = sum(message.times * link.steps(message.collective, machines) for message in found)
    sent = sum(message.times * link.sent(message, machines) for message in found)
    return sum(message.times for message in found), steps, sent


def owned(S: int, machines: int) -> int:
    """Keys of ``S`` that the fullest machine, the first, holds."""
    return Shares(0, machines).before(S)


def attention(config: Method | None, S: int, D: int) -> int:
    """Bytes that a decode step reads and writes per KV head."""
    if config is None or S <= config.attended:
        return ITEM * dense_elements(S, D)
    return config.step_bytes(S, D, itemsize=ITEM, row_bytes=ITEM * D)


def beside(config: Method | None, S: int, D: int) -> int:
    """Bytes per KV head that a method keeps beside the cache: what it chooses by, of all components."""
    if config is None:
        return 0
    whole: Any = dataclasses.replace(config, rank=D) if hasattr(config, "rank") else config
    return int(ITEM * (whole.elements(S, D) - whole.rows(S) * D - whole.elements(0, D)))


def read(model: Model, way: Way, machines: int, S: int) -> float:
    """Bytes of a decode step: of the slowest machine, or in a pipeline of all.

    The keys that a sparse method attends may all be one machine's, and are counted so.
    """
    divides = way.sharing == "tensor"
    heads = model.shape.Hkv / (machines if divides else 1)
    keys = owned(S, machines) if way.sharing == "context" else S
    attended = model.layers * heads * attention(way.config, keys, model.shape.D)
    return model.weights(machines if divides else 1, held=False) + attended


def held(model: Model, way: Way, machines: int, S: int) -> tuple[float, float, float]:
    """Bytes of the fullest machine: weights, keys and values, and what a method keeps beside them."""
    D, context = model.shape.D, way.sharing == "context"
    keys = owned(S, machines) if context else S
    heads = model.layers * model.shape.Hkv / (1 if context else machines)
    weights = model.weights(1 if context else machines, held=True)
    return weights, heads * keys * 2 * D * ITEM, heads * beside(way.config, keys, D)


def fits(chip: Chip, model: Model, way: Way, machines: int, S: int) -> bool:
    """Whether the GPU of the fullest machine may have that much."""
    return sum(held(model, way, machines, S)) <= USABLE * chip.memory


def longest(chip: Chip, model: Model, way: Way, machines: int) -> int:
    """The longest context that `fits`, in thousands of 1,024."""
    weights, *kept = held(model, way, machines, LENGTHS[-1])
    return max(0, int((USABLE * chip.memory - weights) / sum(kept) * LENGTHS[-1])) // 1024


def time(chip: Chip, link: Link, model: Model, way: Way, machines: int, S: int) -> Bracket:
    """Milliseconds of a decode step, with the best and with the worst that is published of the link."""
    _, steps, sent = wire(link, model, way, machines)
    reading = read(model, way, machines, S) / chip.bandwidth
    best, worst = (
        1e3 * (reading + steps * latency + sent / bandwidth)
        for latency, bandwidth in zip(link.latency, link.bandwidth, strict=True)
    )
    return best, worst


def pays_from(chip: Chip, link: Link, model: Model, ours: Way, theirs: Way, machines: int, end: int) -> int | None:
    """The first of `LENGTHS` from which on ``ours`` is faster than ``theirs``; None if it is not at the last.

    ``end`` says which end of the brackets; ``theirs`` of one machine is on one.
    """
    first = None
    for S in reversed(LENGTHS):
        if time(chip, link, model, ours, machines, S)[end] >= time(chip, link, model, theirs, machines, S)[end]:
            break
        first = S
    return first


def ways(config: Method) -> list[Way]:
    """All that are compared."""
    both = (None, config)
    found = [Way(sharing, method) for sharing in ("one", "tensor", "pipeline") for method in both]
    return [*found, Way("context"), Way("context", config, exact=True), Way("context", config)]


def pairs(config: Method) -> list[tuple[Way, Way]]:
    """Context sharding, and what it is compared with."""
    dense, exact, local = ways(config)[-3:]
    return [(way, Way(other, way.config)) for other in ("one", "tensor") for way in (dense, exact, local)]


def rows(config: Method) -> Iterator[dict[str, Any]]:
    """What the model says of each chip, model, number of machines and context, and from what context on which way pays.

    Raises:
        ConfigError: the rank is larger than a head dim.
    """
    config.check_head_dim(min(model.shape.D for model in MODELS))
    for chip in CHIPS:
        for model in MODELS:
            for machines in MACHINES:
                about = {"chip": chip.name, "model": model.name, "machines": machines}
                for S in CONTEXTS:
                    yield about | {"context": S} | _at(chip, model, machines, S, config)
                for link in LINKS:
                    yield about | {"link": link.name, "pays_from": _crossings(chip, link, model, machines, config)}


def _at(chip: Chip, model: Model, machines: int, S: int, config: Method) -> dict[str, Any]:
    found: dict[str, Any] = {"held": {}, "fits": {}, "milliseconds": {link.name: {} for link in LINKS}}
    for way in ways(config):
        number = 1 if way.sharing == "one" else machines
        found["held"][way.name] = held(model, way, number, S)
        found["fits"][way.name] = fits(chip, model, way, number, S)
        for link in LINKS:
            found["milliseconds"][link.name][way.name] = time(chip, link, model, way, number, S)
    return found


def _crossings(chip: Chip, link: Link, model: Model, machines: int, config: Method) -> dict[str, dict[str, int | None]]:
    return {
        f"{ours.name} to {theirs.name}": {
            name: pays_from(chip, link, model, ours, theirs, machines, end) for name, end in END.items()
        }
        for ours, theirs in pairs(config)
    }


def indifferent(chip: Chip, link: Link, model: Model, machines: int) -> float:
    """Seconds of a step with which dense context sharding takes as long as tensor parallelism, bytes sent left out."""
    tensor, context = Way("tensor"), Way("context")
    saved = read(model, context, machines, CONTEXTS[-1]) - read(model, tensor, machines, CONTEXTS[-1])
    (_, more, _), (_, fewer, _) = (wire(link, model, way, machines) for way in (tensor, context))
    return saved / chip.bandwidth / (more - fewer)
