"""`act-exporter doctor` as a user types it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from alerting.recovery import TrainingGuard
from tests.alerting.recovery.trainer import FakeDetector

COMMAND = Path(sys.executable).parent / "act-exporter"

USERS_MODULE = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.up = nn.Linear(4, 8)
        self.down = nn.Linear(8, 1)

    def forward(self, x):
        return self.down(self.up(x).relu())


def build():
    return Net(), torch.randn(3, 4)


def sick():
    model, batch = build()
    with torch.no_grad():
        model.down.weight[0, 0] = float("nan")
    return {"model": model, "batch": batch}


def misfit():
    return Net(), torch.randn(3, 5)


def of_loader(batch=None):
    ids, x = batch
    return Net(), x




def only_model():
    return Net()


def nothing():
    return 3


def unknown():
    return {"model": Net(), "batch": torch.ones(1, 4), "loss": 1, "lr": 2}


def no_model():
    return torch.ones(1), torch.ones(1)


def failing():
    raise ValueError("no data\\nin here")
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(USERS_MODULE)
    return tmp_path


def doctor(folder: Path, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [COMMAND, "doctor", *arguments],
        cwd=folder,
        env={**os.environ, "COLUMNS": "100", "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )


class TestExitCode:
    def test_a_healthy_model_gives_0(self, folder: Path) -> None:
        done = doctor(folder, "mine:build")
        assert done.returncode == 0, done.stdout + done.stderr
        assert "critical" not in done.stdout.splitlines()[0]
        assert "checks ran" in done.stdout.splitlines()[0]
        assert "\n    clipping: needs " in done.stdout

    def test_a_sick_one_gives_1_and_says_where(self, folder: Path) -> None:
        done = doctor(folder, "mine:sick")
        assert done.returncode == 1, done.stdout + done.stderr
        assert "\ncritical  nonfinite-weight  down\n" in done.stdout
        assert done.stdout.index("nonfinite-weight") < done.stdout.index("Change: ")

    def test_a_batch_that_the_model_cannot_run_gives_2(self, folder: Path) -> None:
        done = doctor(folder, "mine:misfit")
        assert done.returncode == 2
        assert "The forward failed: RuntimeError: mat1 and mat2 shapes cannot be" in done.stdout

    def test_quiet_is_the_code_alone(self, folder: Path) -> None:
        done = doctor(folder, "mine:sick", "--quiet")
        assert (done.returncode, done.stdout, done.stderr) == (1, "", "")


class TestFiles:
    def test_json_to_the_standard_output_is_nothing_but_json(self, folder: Path) -> None:
        done = doctor(folder, "mine:sick", "--json", "-")
        said = json.loads(done.stdout)
        assert said["findings"][0]["fault"] == "nonfinite-weight"
        assert said["findings"][0]["layer"] == "down"

    def test_json_and_picture_go_into_files(self, folder: Path) -> None:
        done = doctor(folder, "mine:build", "--json", "found.json", "--picture", "net.png")
        assert done.returncode == 0, done.stderr
        assert "checks ran" in done.stdout
        assert json.loads((folder / "found.json").read_text())["profile"][0]["layer"] == "up"
        assert (folder / "net.png").read_bytes().startswith(b"\x89PNG")

    def test_a_reproduction_needs_a_model_that_has_one(self, folder: Path) -> None:
        done = doctor(folder, "mine:build", "--reproduction", "small.py")
        assert done.returncode == 2
        assert "needs a model of a class of transformers" in done.stderr
        assert not (folder / "small.py").exists()


class TestHelp:
    def test_its_example_can_be_pasted(self, folder: Path) -> None:
        done = doctor(folder, "--help")
        assert done.returncode == 0
        lines = [line.strip(" │") for line in done.stdout.splitlines()]
        assert "act-exporter doctor sick:build --picture sick.png" in done.stdout
        first, last = lines.index("import torch"), lines.index("def build():") + 3
        body = [line.replace("│", " ") for line in done.stdout.splitlines()[first : last + 1]]
        indent = len(body[0]) - len(body[0].lstrip())
        (folder / "sick.py").write_text("\n".join(line[indent:].rstrip() for line in body))
        done = doctor(folder, "sick:build", "--reproduction", "small.py")
        assert done.returncode == 1, done.stdout + done.stderr
        assert "initializer_range" in (folder / "small.py").read_text()


class TestMistakes:
    @pytest.mark.parametrize(
        ("arguments", "says"),
        [
            (["mine"], "'mine' is not of the form module:function, such as train:build_model"),
            (["other:build"], "no module 'other' can be imported from {folder}"),
            (["mine:buidl"], "module 'mine' has no function 'buidl'"),
            (["mine:failing"], "mine:failing failed: ValueError: no data in here"),
            (["mine:nothing"], "mine:nothing returned int; return a model and a batch, or a dict"),
            (["mine:unknown"], "mine:unknown returned a dict with loss, lr; what can be examined"),
            (["mine:no_model"], "mine:no_model returned no torch.nn.Module as its model"),
            (["mine:only_model"], "mine:only_model returned no batch: return one, or give a file"),
            (["mine:build", "--batch", "absent.pt"], "batch absent.pt: No such file or directory"),
            (["mine:build", "--batch", "mine.py"], "batch mine.py cannot be read: "),
            (["mine:build", "--checkpoint", "."], ". is no checkpoint of a TrainingGuard: "),
        ],
    )
    def test_are_one_sentence(self, folder: Path, arguments: list[str], says: str) -> None:
        done = doctor(folder, *arguments)
        assert done.returncode == 2
        assert done.stdout == ""
        assert done.stderr.startswith(f"act-exporter: {says.format(folder=folder)}")
        assert done.stderr.count("\n") == 1


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A guarded run of the user's model, whose step 3 was bad: its down is NaN from then on."""
    folder = tmp_path_factory.mktemp("run")
    names: dict[str, type[nn.Module]] = {}
    exec(USERS_MODULE, names)
    model = names["Net"]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    detector = FakeDetector()
    guard = TrainingGuard(
        folder,
        model=model,
        optimizer=optimizer,
        loader=DataLoader(list(enumerate(torch.randn(8, 4))), 2),
        exporter=detector,
        run="toy",
        save_every_steps=2,
        save_batch_bytes=1 << 20,
    )
    for step, (_, x) in guard.steps(4):
        model(x).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 3:
            with torch.no_grad():
                model.down.weight[0, 0] = torch.nan
            detector.see_bad()
    return folder


class TestAfterAnAlert:
    BATCH = "batches/step-00000003-rank-00000.pt"

    def test_the_weights_and_the_batch_of_a_run_are_examined(
        self, folder: Path, run_folder: Path
    ) -> None:
        files = {"before": "step-00000002-g0", "after": "step-00000004-g0"}
        for when, name in files.items():
            checkpoint = run_folder / "checkpoints" / name
            batch = run_folder / self.BATCH
            done = doctor(
                folder,
                "mine:of_loader",
                "--checkpoint",
                checkpoint,
                "--batch",
                batch,
                "--json",
                "-",
            )
            said = json.loads(done.stdout)
            assert said["profile"][0]["shape"] == [2, 4], "the batch of the file"
            found = {(one["fault"], one["layer"]) for one in said["findings"]}
            assert (("nonfinite-weight", "down") in found) is (when == "after")
            assert done.returncode == (when == "after"), done.stderr

    def test_a_function_that_takes_no_batch_gets_the_files_in_its_place(self, folder: Path) -> None:
        torch.save(torch.full((7, 4), 2.0), folder / "seven.pt")
        for target in ("mine:only_model", "mine:build"):
            done = doctor(folder, target, "--batch", "seven.pt", "--json", "-")
            assert json.loads(done.stdout)["profile"][0]["shape"] == [7, 4]

    def test_another_models_checkpoint_is_refused(self, folder: Path, run_folder: Path) -> None:
        (folder / "other.py").write_text(
            "import torch\ndef build(): return torch.nn.Linear(4, 1), torch.ones(1, 4)"
        )
        checkpoint = run_folder / "checkpoints" / "step-00000002-g0"
        done = doctor(folder, "other:build", "--checkpoint", checkpoint)
        assert done.returncode == 2
        assert done.stderr == (
            f"act-exporter: {checkpoint} is of another model: the checkpoint has no bias, weight\n"
        )

    def test_a_checkpoint_that_has_lost_a_file_is_refused(
        self, folder: Path, run_folder: Path, tmp_path: Path
    ) -> None:
        torn = tmp_path / "torn"
        torn.mkdir()
        whole = run_folder / "checkpoints" / "step-00000002-g0"
        (torn / ".metadata").write_bytes((whole / ".metadata").read_bytes())
        done = doctor(folder, "mine:build", "--checkpoint", torn)
        assert done.returncode == 2
        assert f"{torn} cannot be loaded: FileNotFoundError" in done.stderr
        assert done.stderr.count("\n") == 1
