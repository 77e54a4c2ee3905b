"""How pictures look, and what tasks are called in them."""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import TYPE_CHECKING, Any

from ....methods import METHODS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
DENSE = "#000000"
OTHER = "#666666"
BITS, MASS = "bits_per_byte", "retained_mass"

TITLES = {
    "repetition": "Repetition: copy on from an excerpt of the prompt",
    BITS: "Bits per byte: predict real text",
    "needle": "Needle: find what is stated once in a long text",
    "key_value": "Key-value recall: find a key's value in a long list",
    "multi_key": "Multi-key: find one key's value among keys like it",
    "question": "Question: find an answer among passages that confuse",
    MASS: "Retained mass: attention that a sparse prompt keeps",
}
# Lines and markers of one method with several settings.
DASHES: Sequence[Any] = ("-", "--", ":", "-.", (0, (5, 1)), (0, (1, 1)), (0, (3, 1, 1, 1)), (0, (8, 2)))
MARKERS = "o^sDvPX*<>"
MOST_LINES, MOST_NOTES = 40, 12
LONGEST, LONGEST_NOTE = 80, 120  # characters of a label and of a remark
PANEL, MOST_PANELS = (3.6, 2.8), 12  # inches of a panel, and how many there are of them in a picture
LEAST_WIDTH, LINE, NOTE = 5.2, 0.17, 0.135  # inches: of a figure, of a line of its legend, of one of its remarks

RC = {
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlesize": 9,
    "font.sans-serif": ["DejaVu Sans", "Verdana"],  # as wide as one another, so a page without one looks the same
    "font.size": 8,
    "grid.alpha": 0.3,
    "legend.frameon": False,
    "svg.fonttype": "none",  # small files whose words can be read, selected and searched
    "text.parse_math": False,  # a name may hold dollars
}


@contextmanager
def styled(name: str = "") -> Iterator[None]:
    """Draw with our settings and no others: a user's matplotlibrc changes no picture. Also a decorator.

    Args:
        name: of a picture; it is in the ids that parts of the SVG refer to.
    """
    from matplotlib import style

    with style.context(RC | {"svg.hashsalt": f"mlx-sparse {name}"}, after_reset=True), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from")  # the reader's fonts draw the text, not ours
        yield


def title(task: str) -> str:
    """The heading of a task; its name if it has none."""
    return TITLES.get(task, task)


def count(examples: Iterable[int]) -> str:
    """The numbers of examples as "n = 50", or as a range where rows differ."""
    found = sorted(set(examples))
    return f"n = {found[0]:,}" if len(found) == 1 else f"n = {found[0]:,} to {found[-1]:,}"


def name_of(method: str) -> str:
    """The method that decodes, or runs a prompt, in a label such as ``sample+sparq:rank=16`` or ``sparq on ops``."""
    return method.rpartition("+")[2].partition(":")[0].partition(" ")[0]


def look_of(method: str) -> tuple[str, str]:
    """Colour and marker of the method that a label names, the same in every picture."""
    known = METHODS.get(name_of(method))
    return (OTHER, "X") if known is None else known.look


def looks(methods: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Arguments of a line for each of the first `MOST_LINES` methods.

    They are colour and marker of its kind, and other markers and dashes where there are several of the kind.
    """
    found: dict[str, dict[str, Any]] = {}
    for method in islice(dict.fromkeys(methods), MOST_LINES):
        colour, first = look_of(method)
        like = sum(name_of(other) == name_of(method) for other in found)
        markers = first + MARKERS.replace(first, "")
        dashes = DASHES[like % len(DASHES)]
        found[method] = {"color": colour, "marker": markers[like % len(markers)], "linestyle": dashes}
    return found


class Sheet:
    """A figure of ``panels`` axes of ``size`` inches, at most ``across`` side by side, and below them its key.

    The key is the legend, and remarks under it.
    """

    def __init__(self, title: str, panels: int, size: tuple[float, float], *, across: int = 3) -> None:
        from matplotlib.figure import Figure

        columns = min(panels, across)
        rows = -(-panels // columns)
        self.width, self.height = max(size[0] * columns, LEAST_WIDTH), size[1] * rows + 0.3
        self.figure = Figure(figsize=(self.width, self.height))
        self.figure.set_layout_engine("constrained", w_pad=0.07, h_pad=0.05)
        self.grid = self.figure.add_gridspec(2, 1)
        self.above = self.figure.add_subfigure(self.grid[0])
        self.below = self.figure.add_subfigure(self.grid[1])
        self.above.suptitle(title, fontsize=10)
        axes = list(self.above.subplots(rows, columns, squeeze=False).flatten())
        for ax in axes[panels:]:
            ax.remove()
        self.axes: list[Axes] = axes[:panels]
        self.entries: dict[str, Any] = {}
        self.notes: dict[str, None] = {}

    def enter(self, label: str, artist: Any) -> None:
        """Give ``artist`` a line in the legend, once."""
        self.entries.setdefault(clean(label), artist)

    def note(self, text: str) -> None:
        """A remark below the legend, once."""
        self.notes.setdefault(clean(text, LONGEST_NOTE))

    def finish(self) -> Figure:
        """The figure, its key drawn."""
        notes = list(self.notes)
        if len(notes) > MOST_NOTES:
            notes[MOST_NOTES:] = [f"And {len(notes) - MOST_NOTES:,} more remarks: see the tables."]
        longest = max(map(len, self.entries), default=0)
        columns = max(1, int(self.width // (0.6 + 0.065 * longest)))
        lines = LINE * -(-len(self.entries) // columns)
        below = lines + NOTE * len(notes) + 0.15
        if self.entries:
            self.below.legend([*self.entries.values()], [*self.entries], loc="upper left", ncols=columns)
        self.below.text(0.01, 0.04 / below, "\n".join(notes), va="bottom", fontsize=7, color="0.3")
        self.figure.set_size_inches(self.width, self.height + below)
        self.grid.set_height_ratios([self.height, below])
        return self.figure


def clean(text: Any, longest: int = LONGEST) -> str:
    """``text`` on one line, without what cannot be printed; its middle is left out where it is too long."""
    line = "".join(letter if letter.isprintable() else REPLACEMENT for letter in str(text))
    half = (longest - 1) // 2
    return line if len(line) <= longest else f"{line[:half]}…{line[-half:]}"


def svg(figure: Figure, name: str = "") -> str:
    """The figure as SVG, the same for the same figures; ``name`` is in the ids that its parts refer to."""
    file = io.StringIO()
    with styled(name):
        figure.savefig(file, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Type", "Format")))
    # Nothing refers to groups and images, and a page with several pictures may have each id only once.
    return re.sub(r'(<(?:g|image)\b[^>]*?) id="[^"]*"', r"\1", file.getvalue())
