"""One frozen dataclass per method, which answers for itself: what it is, its settings, when it pays, what it moves.

``"sparq:rank=16,top_k=64"`` is the text form: ``METHOD[:key=value,...][+METHOD...]``. `parse` reads it, ``str(method)``
prints it. `METHODS` has them all by name; `mlx_sparse.methods.table` says which function runs each of them where, and
what keeps what they keep beside a cache. Names are imported on first use: `mlx_sparse.cuda_ref` needs the table alone.
"""

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from .base import NEVER as NEVER
    from .base import QK_NORMS as QK_NORMS
    from .base import Dense as Dense
    from .base import Method as Method
    from .base import Prefill as Prefill
    from .base import Step as Step
    from .baselines import H2O as H2O
    from .baselines import BigBird as BigBird
    from .baselines import FlexGen as FlexGen
    from .baselines import MInference as MInference
    from .baselines import OracleTopK as OracleTopK
    from .baselines import Streaming as Streaming
    from .baselines import StreamingPrefill as StreamingPrefill
    from .cost import ENOUGH_SAVED as ENOUGH_SAVED
    from .cost import SAMPLE_PAYS_FROM as SAMPLE_PAYS_FROM
    from .cost import SAMPLE_PAYS_UP_TO as SAMPLE_PAYS_UP_TO
    from .cost import nvidia_kind as nvidia_kind
    from .saap import SAAP as SAAP
    from .sample import Sample as Sample
    from .sample import SampleRange as SampleRange
    from .sparq import SparQ as SparQ
    from .text import MAX_TOML_BYTES as MAX_TOML_BYTES
    from .text import METHODS as METHODS
    from .text import load_toml as load_toml
    from .text import parse as parse
    from .text import read_toml as read_toml
    from .text import split_methods as split_methods

_HOMES = {
    "baselines": "BigBird FlexGen H2O MInference OracleTopK Streaming StreamingPrefill",
    "base": "NEVER QK_NORMS Dense Method Prefill Step",
    "cost": "ENOUGH_SAVED SAMPLE_PAYS_FROM SAMPLE_PAYS_UP_TO nvidia_kind",
    "saap": "SAAP",
    "sample": "Sample SampleRange",
    "sparq": "SparQ",
    "text": "MAX_TOML_BYTES METHODS load_toml parse read_toml split_methods",
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names.split()}


def __getattr__(name: str) -> "Any":
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value = globals()[name] = getattr(import_module(f"{__name__}.{_HOME_OF[name]}"), name)
    return value
