"""docs/doctor.md, followed: its models, its commands, what they print, and its table of faults."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from act_exporter.doctor.checks import CHECKS
from alerting.recovery import TrainingGuard
from deploy.demo import train
from deploy.demo.servers import REPOSITORY
from tests.alerting.recovery.trainer import FakeDetector

PAGE = (REPOSITORY / "docs" / "doctor.md").read_text()
PYTHON = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
SHELL = re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL)
CHECKPOINT, BATCH = "step-00000400-g0", "step-00000437-rank-00000.pt"


def block(part: str, blocks: list[str]) -> str:
    """The one block that has `part` in it."""
    (found,) = [text for text in blocks if part in text]
    return found


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an engineer: gpt.py, and a run of its model whose first step was bad."""
    folder = tmp_path_factory.mktemp("desk")
    (folder / "gpt.py").write_text(block("def mended", PYTHON))
    torch.manual_seed(0)
    model = train.GPT(4, 128, 4, 96, train.exp_attention)
    windows = train.Windows(bytes(range(256)) * 20, 96)
    detector = FakeDetector("gpt-demo")
    guard = TrainingGuard(
        folder / "build" / "demo" / "runs" / "gpt-demo",
        model=model,
        optimizer=torch.optim.SGD(model.parameters()),
        loader=DataLoader(windows, 8),
        exporter=detector,
        save_batch_bytes=1 << 20,
    )
    for _ in guard.steps(1):
        detector.see_bad()
    return folder


def run(desk: Path, commands: str) -> subprocess.CompletedProcess[str]:
    for theirs, ours in ((CHECKPOINT, "step-00000000-g0"), (BATCH, "step-00000001-rank-00000.pt")):
        assert theirs in commands
        commands = commands.replace(theirs, ours)
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    return subprocess.run(
        ["bash", "-ec", commands],
        cwd=desk,
        env={**os.environ, "PATH": path, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_the_model_is_told_what_the_page_says_and_the_mended_one_is_well(desk: Path) -> None:
    done = run(desk, block("gpt:build", SHELL))
    assert done.returncode == 1, done.stdout + done.stderr
    said = PAGE.split(block("gpt:build", SHELL))[1].split("```\n")[2].splitlines()
    first = next(line for line in done.stdout.splitlines() if line.startswith("critical"))
    assert first == said[0]
    change = " ".join(" ".join(said).partition("Change: ")[2].partition("Why: ")[0].split())
    assert change in " ".join(done.stdout.split())
    assert (desk / "gpt.png").exists()
    done = run(desk, block("gpt:mended", SHELL))
    assert done.returncode == 0, done.stdout + done.stderr
    assert not re.search("^(critical|warning)", done.stdout, re.MULTILINE)


@pytest.mark.parametrize("name", ["exp_attention", "normalised_attention"])
def test_the_attentions_are_the_demos(name: str) -> None:
    names: dict[str, Any] = {}
    exec(block(f"def {name}", PYTHON), names)
    tensors = torch.randn(3, 2, 4, 9, 5)
    assert torch.equal(names[name](*tensors), getattr(train, name)(*tensors))


def test_the_first_lines_print_a_report(capsys: pytest.CaptureFixture[str]) -> None:
    exec(PYTHON[0], {"model": nn.Linear(3, 2), "batch": torch.ones(1, 3)})
    assert f"of {len(CHECKS)} checks ran" in capsys.readouterr().out


def test_the_table_has_all_faults_with_what_they_mean() -> None:
    rows = re.findall(r"^\| (?:`(\w+)` )?\| `([a-z0-9-]+)` \| (.*) \|$", PAGE, re.MULTILINE)
    check, said = "", {}
    for name, fault, meaning in rows:
        check = name or check
        said[check, fault] = meaning
    assert said == {
        (module.__name__.rpartition(".")[2], fault): meaning
        for module in CHECKS
        for fault, meaning in module.FAULTS.items()
    }
