"""Expressions of dashboards as Prometheus gets them, and what promtool says of them."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

import yaml

from deploy.demo.servers import binary

# As Grafana fills them in for a range of an hour: several values as alternatives, All as a pattern.
VALUES = {
    "__rate_interval": "1m",
    "__range": "1h",
    "run": "gpt",
    "rank": "(all|0)",
    "layer": "(h.0|h.1)",
    "tensor": ".+",
    "node": "(a|b)",
}


def filled(expr: str) -> str:
    """The expression with a value in place of each variable.

    Raises:
        KeyError: of a variable that no dashboard has.
    """
    return re.sub(r"\$(\w+)", lambda found: VALUES[found[1]], expr)


def complaints(expressions: Sequence[str], folder: Path) -> str:
    """What promtool has against them; empty where each is valid."""
    rules = [
        {"record": f"query:{number}", "expr": filled(expr)}
        for number, expr in enumerate(expressions)
    ]
    file = folder / "rules.yml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "dashboards", "rules": rules}]}))
    done = subprocess.run(
        [binary("promtool"), "check", "rules", file], capture_output=True, text=True
    )
    return done.stderr if done.returncode else ""


def metrics(expr: str) -> set[str]:
    """Names of all series that it asks for."""
    # Labels, strings and ranges hold none.
    bare = re.sub(r"\{[^{}]*\}|\[[^\]]*\]|\"[^\"]*\"", " ", expr)
    bare = re.sub(r"\b(by|without|on|ignoring|group_left|group_right)\s*\([^)]*\)", " ", bare)
    words = re.findall(r"[a-zA-Z_][\w:]*(?!\s*\()(?![\w:])", bare)
    return set(words) - {"and", "or", "unless", "by", "on", "group_left", "group_right"}
