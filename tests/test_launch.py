"""deploy/launch.sh: a run that is repeated, and resumed, by the same command."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from deploy.demo.servers import REPOSITORY


def launch(folder: Path, **settings: str) -> str:
    """Run it to its end and return the log."""
    environment = {
        "PATH": os.environ["PATH"],
        "PYTHON": sys.executable,
        "LOG_DIR": str(folder),
        "ACT_RUN": "launched",
        "ACT_PORT": "0",
        **settings,
    }
    size = ["--layers", "2", "--width", "16", "--context", "16", "--batch", "4"]
    done = subprocess.run(
        ["sh", REPOSITORY / "deploy" / "launch.sh", *size],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    log = (folder / "launched.log").read_text()
    assert done.returncode == 0, done.stderr + log
    return log


def test_the_same_command_resumes_the_run(tmp_path: Path) -> None:
    first = launch(tmp_path, STEPS="20", SEED="3", PRECISION="bf16")
    assert "finished at step 20" in first
    assert "published checkpoint step-00000020" in first
    again = launch(tmp_path, STEPS="30", SEED="3", PRECISION="bf16").removeprefix(first)
    assert "published checkpoint step-00000030" in again
    assert "step 0:" not in again


def test_its_log_is_readable_by_user_and_group_only(tmp_path: Path) -> None:
    folder = tmp_path / "runs"
    launch(folder, STEPS="2")
    assert folder.stat().st_mode & 0o777 == 0o750
    assert (folder / "launched.log").stat().st_mode & 0o777 == 0o640


def test_a_data_folder_without_text_is_named(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "deploy.demo.train", "--data", tmp_path],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1
    assert done.stderr.strip().endswith(f"--data {tmp_path}: no Python files in it")
