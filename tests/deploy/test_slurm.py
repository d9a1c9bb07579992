"""deploy/slurm/train.sbatch, by bash, with the real supervisor and a stand-in for scontrol.

Slurm does not run where these tests do: what it does with the `#SBATCH` lines was not seen.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from alerting.exit_codes import RESTART
from deploy.demo.servers import REPOSITORY, wait_for

SCRIPT = REPOSITORY / "deploy" / "slurm" / "train.sbatch"


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """What Slurm sets, and a PATH on which scontrol writes down what it is told."""
    (tmp_path / "bin").mkdir()
    scontrol = tmp_path / "bin" / "scontrol"
    scontrol.write_text(f'#!/bin/sh\necho "$@" >>{tmp_path}/told\n')
    scontrol.chmod(0o755)
    path = os.pathsep.join([str(tmp_path / "bin"), str(Path(sys.executable).parent)])
    return {
        **os.environ,
        "PATH": f"{path}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(REPOSITORY),
        "RUNS": str(tmp_path / "runs"),
        "SLURM_JOB_NAME": "gpt",
        "SLURM_JOB_ID": "4711",
    }


def start(tmp_path: Path, environment: dict[str, str], fault: str) -> subprocess.Popen[bytes]:
    folder = tmp_path / "runs" / "gpt"
    folder.mkdir(parents=True)
    trainer = [sys.executable, "-m", "tests.alerting.supervise.child", folder, tmp_path / "log"]
    return subprocess.Popen(["bash", SCRIPT, *trainer, fault, "3"], cwd=tmp_path, env=environment)


def test_before_its_time_ends_the_trainer_saves_and_the_job_is_queued_again(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    job = start(tmp_path, environment, "slow")
    wait_for((tmp_path / "runs/gpt/ready").exists, "the trainer's third step", timeout=60)
    job.send_signal(signal.SIGTERM)
    assert job.wait(timeout=60) == RESTART
    assert (tmp_path / "told").read_text() == "requeue 4711\n"
    assert list((tmp_path / "runs" / "gpt").rglob("manifest.json"))


def test_a_run_that_has_ended_is_not_queued_again(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    job = start(tmp_path, environment, "crash")
    assert job.wait(timeout=60) == 0
    assert len((tmp_path / "log").read_text().splitlines()) >= 20
    assert not (tmp_path / "told").exists()
