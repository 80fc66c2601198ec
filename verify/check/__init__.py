"""`check`: a compiled model beside the reference and the full cache, and the report of it."""

from .compare import check
from .report import Finding, Ranking, Report, RowReport, Stability

__all__ = ["Finding", "Ranking", "Report", "RowReport", "Stability", "check"]
