"""Traces that come with the workbench; ``scripts/record_trace.py`` records them."""

from pathlib import Path

RECORDED = Path(__file__).parent
