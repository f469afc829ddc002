"""One JSON line a step into a file: what an operator or a benchmark looks at when averages are not enough.

Must not know: sessions, tensors. An observer beside the metrics; started by `verifier_process`.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from cloud_verifier.reports import NoObserver, StepReport
from shared.errors import ConfigError


class StepLog(NoObserver):
    """Writes every step's report as it comes."""

    def __init__(self, file: Path) -> None:
        """Raises: ConfigError naming step_log if the file cannot be written."""
        try:
            self._file = file.open("w", encoding="utf-8", buffering=1)
        except OSError as error:
            raise ConfigError(f"step_log: {file} cannot be written: {error.strerror}", field="step_log") from error

    def step(self, report: StepReport) -> None:
        """See Observer."""
        shown = {name: round(value, 7) if isinstance(value, float) else value for name, value in asdict(report).items()}
        self._file.write(json.dumps(shown) + "\n")

    def close(self) -> None:
        """Nothing more is written."""
        self._file.close()
