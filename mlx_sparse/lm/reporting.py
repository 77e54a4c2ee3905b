"""What a run with ``--attn`` tells: the user on standard error, a machine as JSON, and the other ranks."""

from __future__ import annotations

import contextlib
import json
import logging
import sys
from typing import TYPE_CHECKING, Any

from ..api.call_report import JSON_KEY, Report
from ..methods import Method
from .ranks import Ranks

if TYPE_CHECKING:
    from .watch import Watch


class Reporting:
    """The reports of a run, and who hears of them.

    Attributes:
        report_as: text, mass, json or off, as ``--attn-report`` asks.
        reports: by model and methods.
        requests: of suites, by kind: the calls they made.
        ranks: this process among those of the run.
        watch: of the other ranks; None without them.
    """

    def __init__(self) -> None:
        self.report_as = "text"
        self.reports: dict[tuple[str, tuple[Method, ...]], Report] = {}
        self.requests: dict[str, Any] = {}
        self.ranks = Ranks()
        self.watch: Watch | None = None
        self._counted: list[Any] = []  # what this rank last told of its reports

    def say(self, text: str) -> None:
        """Tell the user, on standard error."""
        if self.speaks():
            print(f"[mlx-sparse] {text}", file=sys.stderr, flush=True)

    def log(self, text: str) -> None:
        """Tell who keeps the command's log."""
        if self.speaks():
            logging.info(f"[mlx-sparse] {text}")

    def speaks(self) -> bool:
        """Whether this process is the one that tells."""
        return self.report_as != "off" and self.ranks.rank == 0

    def as_dict(self) -> dict[str, Any]:
        """The reports as plain data for JSON."""
        return self._as_dict(self._all_reports())

    def _as_dict(self, reports: list[Report]) -> dict[str, Any]:
        requests = {"requests": self.requests} if self.requests else {}
        return {JSON_KEY: [report.as_dict() for report in reports]} | requests

    def print_report(self) -> None:
        """The call report on standard error, so that the text on standard output stays the model's."""
        if self.speaks():
            self._print(self._all_reports())

    def _print(self, reports: list[Report]) -> None:
        if "json" in self.report_as:
            print(json.dumps(self._as_dict(reports)), file=sys.stderr)
        else:
            for report in reports:
                print(f"[mlx-sparse] {report}", file=sys.stderr)

    def print_at_once(self) -> None:
        """The report of what is known, when another rank is lost and may be waited for for ever."""
        if self.speaks():
            self._print(self._sums(self.counts_so_far()))

    def _all_reports(self) -> list[Report]:
        """The reports; where several ranks run the models, the sums of what they have last told."""
        return list(self.reports.values()) if self.ranks.size == 1 else self._sums(self.last_counts())

    def _sums(self, own: list[Any]) -> list[Report]:
        from .rank_reports import total

        told = {} if self.watch is None else {rank: counts for rank, counts in self.watch.told.items() if counts}
        return [
            total({0: numbers} | {rank: counts[place] for rank, counts in told.items() if place < len(counts)})
            for place, numbers in enumerate(own)
        ]

    def counts_so_far(self) -> list[Any]:
        """What this rank has counted, for the others, at once: what the device is computing is left out."""
        from .rank_reports import numbers_of

        with contextlib.suppress(TimeoutError):
            self._counted = [numbers_of(report, wait=False) for report in list(self.reports.values())]
        return self._counted

    def last_counts(self) -> list[Any]:
        """What this rank has counted, for the others, when it ends: soon, whatever the device does."""
        from .rank_reports import numbers_of
        from .watch import in_time

        found: list[Any] | None = in_time(lambda: [numbers_of(report) for report in list(self.reports.values())])
        return self.counts_so_far() if found is None else found
