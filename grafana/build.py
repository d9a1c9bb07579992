"""Renders `grafana/dashboards` with Grafana's own SDK, for the schema of Grafana 11.6.

`make dashboards` runs it. The files are committed, so that importing them needs no SDK.
"""

from __future__ import annotations

from pathlib import Path

from grafana import exporter, layers, runs, training
from grafana.boards import Board, render

FOLDER = Path(__file__).parent / "dashboards"


def boards() -> list[Board]:
    """All dashboards."""
    return [runs.board(), layers.board(), training.board(), exporter.board()]


def rendered() -> dict[Path, str]:
    """Each dashboard's file and its text."""
    return {FOLDER / f"{board.name}.json": render(board) for board in boards()}


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for path, text in rendered().items():
        path.write_text(text)
