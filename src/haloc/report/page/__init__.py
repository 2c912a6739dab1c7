"""The report as a page: one self-contained HTML file, rendered from the plain values of ``report.json``."""

from haloc.report.page.page import render

__all__ = ["render"]
