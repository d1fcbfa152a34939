"""One self-contained HTML page from result files."""

from longrecall.report.page import build_report, check_packages

__all__ = ["build_report", "check_packages"]
