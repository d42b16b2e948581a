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
    """Make report.md, report.html and their plots from the result file of experiments/compare.py. Needs matplotlib: pip install 'mtp-jax[report]'."""

    results: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="FILE")]
    """Result file."""
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

        try:
            result = json.loads(self.results.read_text(encoding="utf-8"))
        except json.JSONDecodeError as error:
            raise report.ReportError(f"{self.results}: not JSON: {error}") from None
        written = report.write(result, self.out, str(self.results))
        shared.say(f"{len(written)} files in {self.out}")
        return {"files": [str(path) for path in written]}
