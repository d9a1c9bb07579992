"""What is in the wheel, what the command line writes out, and what importing costs."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from deploy.demo.servers import REPOSITORY, binary

SHIPPED = {
    "prometheus/prometheus.yml",
    "prometheus/rules/activations.yml",
    "prometheus/runbook.md",
    "grafana/dashboards/exporter.json",
    "grafana/dashboards/layers.json",
    "grafana/dashboards/runs.json",
    "grafana/dashboards/training.json",
    "grafana/provisioning/dashboards/act.yml",
    "grafana/provisioning/datasources/act.yml",
    "alerting/alertmanager-pair.yml",
    "alerting/alertmanager.yml",
    "alerting/receiver.yml",
    "deploy/agent/scrape.yml",
    "deploy/agent/vmagent.env",
    "deploy/launch.sh",
    "deploy/demo/train.py",
    "deploy/systemd/act-receiver.service",
    "deploy/compose/compose.yaml",
    "deploy/slurm/train.sbatch",
    "deploy/kubernetes/render.py",
    "deploy/kubernetes/templates/receiver.yaml",
    "deploy/kubernetes/manifests/receiver.yaml",
}


def command(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "act_exporter.cli", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=60,
    )


def python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_the_wheel_holds_the_assets_inside_a_package(tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", tmp_path, "."],
        cwd=REPOSITORY,
        check=True,
        capture_output=True,
        timeout=120,
    )
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    top = {name.split("/")[0] for name in names}
    assert {name for name in top if not name.endswith(".dist-info")} == {"act_exporter", "alerting"}
    assert {f"act_exporter/_assets/{name}" for name in SHIPPED} <= set(names)
    assert {"act_exporter/py.typed", "alerting/py.typed"} <= set(names)
    # As installed, the receiver's command line finds what it writes out, and only there.
    assert "alerting/receiver.yml" not in names
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "installed")
    code = "from alerting.shipped import shipped; print(shipped('alerting/receiver.yml').exists())"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path / "installed", capture_output=True, text=True
    )
    assert done.stdout == "True\n", done.stderr
    assert not [name for name in names if "__pycache__" in name]
    assert not [name for name in names if "/grafana/" in name and name.endswith(".py")]


def test_assets_are_written_out_and_valid(tmp_path: Path) -> None:
    done = command("assets", tmp_path / "new")
    assert done.returncode == 0, done.stderr
    assert {str(tmp_path / "new" / name) for name in SHIPPED} <= set(done.stdout.splitlines())
    assert not list((tmp_path / "new" / "grafana").rglob("*.py"))
    subprocess.run(
        [binary("promtool"), "check", "config", tmp_path / "new/prometheus/prometheus.yml"],
        check=True,
        capture_output=True,
    )


def test_assets_overwrite_nothing(tmp_path: Path) -> None:
    own = tmp_path / "prometheus" / "prometheus.yml"
    own.parent.mkdir()
    own.write_text("mine")
    done = command("assets", tmp_path)
    assert done.returncode == 1
    assert done.stderr == f"act-exporter: {own} exists; nothing was written\n"
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [own]


def test_the_trainers_side_imports_no_command_line_and_no_receiver() -> None:
    heavy = {"typer", "rich", "fastapi", "uvicorn", "pydantic", "requests", "triton"}
    code = (
        "import sys, act_exporter; watched = 'alerting' in sys.modules; import alerting.recovery;"
        f"print(watched, sorted(set(sys.modules) & {heavy}))"
    )
    assert python(code) == "False []"


def test_the_guards_side_does_not_import_the_exporter() -> None:
    code = "import sys, alerting.recovery, alerting.worker; print('act_exporter' in sys.modules)"
    assert python(code) == "False"


@pytest.mark.parametrize("package", ["act_exporter", "alerting", "alerting.recovery"])
def test_public_surfaces_are_small_and_complete(package: str) -> None:
    code = (
        f"import {package} as p; names = getattr(p, '__all__', []);"
        "assert len(names) <= 10; assert all(hasattr(p, name) for name in names)"
    )
    python(code)
