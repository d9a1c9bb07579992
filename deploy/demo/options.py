"""What the demo's trainers can be told on their command lines."""

from __future__ import annotations

import argparse
import sysconfig
from pathlib import Path


def common_options(description: str | None) -> argparse.ArgumentParser:
    """A parser of what every trainer takes; its own options may follow."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--data",
        type=Path,
        default=Path(sysconfig.get_path("stdlib")),
        help="folder with Python files to train on (default: the standard library)",
    )
    parser.add_argument("--log-dir", type=Path, default=Path("runs"), help="where run folders lie")
    parser.add_argument("--run", default="gpt-demo", help="the run's name (default: %(default)s)")
    parser.add_argument("--port", type=int, help="of /metrics (default: ACT_PORT, else 9460)")
    parser.add_argument("--seed", type=int, default=1, help="default: %(default)s")
    parser.add_argument("--steps", type=int, default=2000, help="default: %(default)s")
    parser.add_argument("--layers", type=int, default=4, help="default: %(default)s")
    parser.add_argument("--width", type=int, default=128, help="default: %(default)s")
    parser.add_argument("--context", type=int, default=96, help="default: %(default)s")
    parser.add_argument("--batch", type=int, default=8, help="default: %(default)s")
    parser.add_argument("--save-every", type=int, default=500, help="steps (default: %(default)s)")
    parser.add_argument(
        "--fault-step", type=int, help="multiply one inner layer's weights before this step"
    )
    parser.add_argument("--fault-factor", type=float, default=100.0, help="default: %(default)s")
    return parser
