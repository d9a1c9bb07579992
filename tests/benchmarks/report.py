"""What every benchmark says beside its figures: when, on what, with which versions."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from deploy.demo.servers import REPOSITORY


def parser_of(doc: str | None, name: str, quick: str) -> argparse.ArgumentParser:
    """A parser that knows --quick and --out.

    Args:
        doc: the benchmark's docstring.
        name: of the file that it writes.
        quick: what --quick leaves out.
    """
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help=f"{quick}; no figure to quote")
    parser.add_argument("--out", type=Path, default=REPOSITORY / "build" / "bench" / name)
    return parser


def setting(distributions: tuple[str, ...], **machine: Any) -> dict[str, Any]:
    """The time, the machine and the versions, as the first keys of a result.

    Args:
        distributions: whose versions matter.
        machine: what else is to be said of the machine.
    """
    return {
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": {
            "processor": platform.machine(),
            "cores": len(os.sched_getaffinity(0)),
            "system": platform.system(),
            **machine,
        },
        "versions": {
            "python": platform.python_version(),
            **{name: importlib.metadata.version(name) for name in distributions},
        },
    }


def write(result: dict[str, Any], path: Path) -> None:
    """Into `path`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1, allow_nan=False) + "\n")
    print(f"written to {path}")
