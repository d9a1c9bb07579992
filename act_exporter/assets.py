"""The files that operators import: rules, configurations, deployment files.

In an installed package they lie inside it, in a checkout at its top; both are found here.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from act_exporter.exceptions import SettingError

_PARTS = ("prometheus", "grafana", "deploy", "alerting")
_PACKAGE = Path(__file__).parent / "_assets"
_CHECKOUT = Path(__file__).parent.parent


def assets_folder() -> Path:
    """The folder that holds `prometheus`, `grafana`, `deploy` and `alerting`."""
    return _PACKAGE if _PACKAGE.is_dir() else _CHECKOUT


def write_assets(folder: Path) -> list[Path]:
    """Write all of them below `folder` and return the files' paths.

    Raises:
        SettingError: one of them is there already; nothing was written.
    """
    source = assets_folder()
    files = [
        path.relative_to(source)
        for part in _PARTS
        for path in sorted((source / part).rglob("*"))
        if path.is_file() and _is_asset(path.relative_to(source))
    ]
    present = [folder / file for file in files if (folder / file).exists()]
    if present:
        raise SettingError(f"{present[0]} exists; nothing was written")
    for file in files:
        target = folder / file
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source / file, target)
    return [folder / file for file in files]


def _is_asset(file: Path) -> bool:
    if "__pycache__" in file.parts:
        return False
    # Beside the dashboards a checkout has what renders them, which needs the SDK of the developers.
    if file.parts[0] == "grafana" and file.suffix == ".py":
        return False
    # Of the alerting package's checkout only the configurations are files to import.
    return file.parts[0] != "alerting" or file.suffix == ".yml"
