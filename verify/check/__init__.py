"""Check a compiled model against the reference and the full cache, and report it."""

from .compare import check
from .report import Report
from .report_data import Finding, Ranking, RowReport, Stability

__all__ = ["Finding", "Ranking", "Report", "RowReport", "Stability", "check"]
