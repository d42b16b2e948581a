"""`mtp-jax report`: a comparison as a page of tables and plots."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from mtp_jax.commands import shared


@dataclass(frozen=True, kw_only=True)
class Report:
    """Make report.md, report.html and their plots from result files of experiments/compare.py. Needs matplotlib: pip install 'mtp-jax[report]'."""

    results: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="FILE ...")]
    """Result files, each a part of the page."""
    out: Annotated[Path, tyro.conf.arg(metavar="FOLDER")]
    """Folder for the report; made if it is not there."""
    json: shared.Switch = False
    """Print the result as one JSON document, the last line on stdout."""

    def status(self, document: Any) -> int:
        """The exit code of a command that ran to its end and returned this document."""
        return 0

    def run(self) -> dict[str, Any]:
        """Returns the files written."""
        from mtp_jax.evaluation import report

        if not self.results:
            raise shared.UsageError("give at least one result file")
        results = {}
        for path in self.results:
            try:
                results[str(path)] = json.loads(path.read_text(encoding="utf-8"))
            except json.JSONDecodeError as error:
                raise report.ReportError(f"{path}: not JSON: {error}") from None
        written = report.write(results, self.out)
        shared.say(f"{len(written)} files in {self.out}")
        return {"files": [str(path) for path in written]}
