"""The dashboards against Grafana's own types, by the TypeScript compiler.

They are written as literals, since only of those does it report keys that the types do not have.
"""

from __future__ import annotations

import copy
import json
import re
import shutil
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from deploy.demo.servers import REPOSITORY
from tests.grafana.dashboards import Dashboard, load

DASHBOARDS = load()
NODE_MODULES = REPOSITORY / "tests" / "node" / "node_modules"
SETTINGS = {
    "compilerOptions": {
        "module": "esnext",
        "moduleResolution": "bundler",
        "noEmit": True,
        "skipLibCheck": True,
        "strict": True,
        "target": "esnext",
        "types": [],
    },
    "include": ["*.ts"],
}


def complaints(folder: Path, dashboards: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """What the compiler says of each, by name; those that are right are left out."""
    shutil.copy(Path(__file__).parent / "schema.d.ts", folder)
    (folder / "node_modules").symlink_to(NODE_MODULES)
    (folder / "tsconfig.json").write_text(json.dumps(SETTINGS))
    for name, raw in dashboards.items():
        (folder / f"{name}.ts").write_text(
            'import type { Dashboard } from "./schema";\n'
            f"export const dashboard: Dashboard = {json.dumps(raw, indent=1)};\n"
        )
    done = subprocess.run(
        [NODE_MODULES / ".bin" / "tsc", "--project", folder, "--pretty", "false"],
        capture_output=True,
        text=True,
        cwd=folder,
    )
    errors: dict[str, str] = {}
    for line in done.stdout.splitlines():
        if (found := re.match(r"(\w+)\.ts\(", line)) is not None:
            errors[found[1]] = errors.get(found[1], "") + line
    assert bool(errors) == (done.returncode != 0), done.stdout + done.stderr
    return errors


def test_they_are_what_grafana_takes(tmp_path: Path) -> None:
    assert complaints(tmp_path, {each.name: each.raw for each in DASHBOARDS}) == {}


def first(raw: dict[str, Any], kind: str) -> dict[str, Any]:
    return next(panel for panel in raw["panels"] if panel["type"] == kind)


def broken(kind: str, change: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
    """The dashboard Layers, the first panel of the kind changed."""
    raw: dict[str, Any] = copy.deepcopy(dict(layers().raw))
    change(first(raw, kind))
    return raw


def layers() -> Dashboard:
    return next(each for each in DASHBOARDS if each.name == "layers")


# The kind of panel whose first one is changed, the change, and what the compiler then speaks of.
BROKEN = {
    "targets": ("timeseries", lambda panel: panel.update(targets="oops"), "Type 'string'"),
    "query": ("timeseries", lambda panel: panel["targets"][0].update(exprr="up"), "exprr"),
    "panel": ("timeseries", lambda panel: panel.update(tittle="Loss"), "tittle"),
    "options": ("heatmap", lambda panel: panel["options"].update(calculated=False), "calculated"),
    "layout": ("heatmap", lambda panel: panel["options"]["rowsFrame"].update(layout="up"), '"up"'),
    "custom": (
        "timeseries",
        lambda panel: panel["fieldConfig"]["defaults"]["custom"].update(lineWide=2),
        "lineWide",
    ),
    "override": (
        "table",
        lambda panel: panel["fieldConfig"]["overrides"][0]["properties"].append(
            {"id": "custom.widht", "value": 3}
        ),
        "custom.widht",
    ),
    "kind": ("stat", lambda panel: panel.update(type="statistic"), '"statistic"'),
    "place": ("stat", lambda panel: panel["gridPos"].update(w="8"), "Type 'string'"),
}


@pytest.fixture(scope="module")
def rejected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    dashboards = {name: broken(kind, change) for name, (kind, change, _) in BROKEN.items()}
    dashboards["dashboard"] = {**layers().raw, "titel": "Layers"}
    dashboards["variable"] = copy.deepcopy(dict(layers().raw))
    dashboards["variable"]["templating"]["list"][1]["refresh"] = 7
    return complaints(tmp_path_factory.mktemp("broken"), dashboards)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        *((name, words) for name, (_, _, words) in BROKEN.items()),
        ("dashboard", "titel"),
        ("variable", "Type '7'"),
    ],
)
def test_what_is_wrong_is_rejected(rejected: dict[str, str], name: str, words: str) -> None:
    assert words in rejected[name]
