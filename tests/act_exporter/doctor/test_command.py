"""`act-exporter doctor` as a user types it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
import typer
from click.testing import Result
from torch import nn
from torch.utils.data import DataLoader
from typer.testing import CliRunner

from act_exporter.doctor import command
from alerting.recovery import TrainingGuard
from tests.alerting.recovery.trainer import FakeDetector

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


def loud():
    model, batch = build()
    model.register_forward_pre_hook(lambda *_: print("forward"))
    return model, batch


def unusable():
    return nn.Embedding(4, 2), torch.tensor([[1, 7]])


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
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the user types: the working folder, with mine.py."""
    (tmp_path / "mine.py").write_text(USERS_MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    for name in ("mine", "other"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return tmp_path


def doctor(*arguments: str | Path) -> Result:
    """The command in this process: a new one would take seconds to import torch."""
    app = typer.Typer()
    app.command()(command.doctor)
    return CliRunner().invoke(app, list(map(str, arguments)))


def typed(folder: Path, line: str) -> subprocess.CompletedProcess[str]:
    """The command in a shell."""
    commands = Path(sys.executable).parent
    return subprocess.run(
        line,
        shell=True,
        cwd=folder,
        env={**os.environ, "COLUMNS": "100", "PATH": f"{commands}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=200,
    )


class TestExitCode:
    def test_a_healthy_model_gives_0(self, folder: Path) -> None:
        done = doctor("mine:build")
        assert done.exit_code == 0, done.stdout + done.stderr
        assert "critical" not in done.stdout.splitlines()[0]
        assert "checks ran" in done.stdout.splitlines()[0]
        assert "\n    clipping: needs " in done.stdout

    def test_a_sick_one_gives_1_and_says_where(self, folder: Path) -> None:
        done = doctor("mine:sick")
        assert done.exit_code == 1, done.stdout + done.stderr
        assert "\ncritical  nonfinite-weight  down\n" in done.stdout
        assert done.stdout.index("nonfinite-weight") < done.stdout.index("Change: ")

    def test_a_batch_that_the_model_cannot_run_gives_2(self, folder: Path) -> None:
        done = doctor("mine:misfit")
        assert done.exit_code == 2
        assert "The forward failed: RuntimeError: mat1 and mat2 shapes cannot be" in done.stdout

    def test_quiet_is_the_code_alone(self, folder: Path) -> None:
        done = doctor("mine:sick", "--quiet")
        assert (done.exit_code, done.stdout, done.stderr) == (1, "", "")


class TestFiles:
    def test_json_to_the_standard_output_is_nothing_but_json(self, folder: Path) -> None:
        done = doctor("mine:sick", "--json", "-")
        said = json.loads(done.stdout)
        assert said["findings"][0]["fault"] == "nonfinite-weight"
        assert said["findings"][0]["layer"] == "down"

    def test_json_and_picture_go_into_files(self, folder: Path) -> None:
        done = doctor("mine:build", "--json", "found.json", "--picture", "net.png")
        assert done.exit_code == 0, done.stderr
        assert "checks ran" in done.stdout
        assert json.loads((folder / "found.json").read_text())["profile"][0]["layer"] == "up"
        assert (folder / "net.png").read_bytes().startswith(b"\x89PNG")

    def test_of_a_batch_that_no_forward_takes_there_is_no_picture(self, folder: Path) -> None:
        done = doctor("mine:unusable", "--picture", "none.png")
        assert done.exit_code == 1
        assert "token-out-of-range" in done.stdout
        assert done.stderr.endswith("act-exporter: none.png not written: no forward to draw\n")
        assert not (folder / "none.png").exists()

    def test_a_reproduction_needs_a_model_that_has_one(self, folder: Path) -> None:
        done = doctor("mine:loud", "--reproduction", "small.py")
        assert done.exit_code == 2
        assert "forward" not in done.stdout, "it is said before the model is examined"
        assert "needs a model of a class of transformers" in done.stderr
        assert not (folder / "small.py").exists()


class TestHelp:
    def test_its_example_can_be_pasted(self, tmp_path: Path) -> None:
        done = typed(tmp_path, "act-exporter doctor --help")
        assert done.returncode == 0
        shown = [line.rstrip() for line in done.stdout.splitlines()]
        first = next(n for n, line in enumerate(shown) if line.strip() == "import torch")
        last = next(n for n, line in enumerate(shown) if "return model, " in line)
        (tmp_path / "sick.py").write_text(textwrap.dedent("\n".join(shown[first : last + 1])))
        (example,) = [line for line in shown if line.strip().startswith("Example: ")]
        line = f"{example.partition(': ')[2]} --reproduction small.py"
        done = typed(tmp_path, line)
        assert done.returncode == 1, done.stdout + done.stderr
        assert "critical  odd-weight  transformer.h.2.mlp.c_fc\n" in done.stdout
        assert (tmp_path / "sick.png").exists()
        assert "GPT2Config(" in (tmp_path / "small.py").read_text()


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
        done = doctor(*arguments)
        assert done.exit_code == 2
        assert done.stdout == ""
        assert done.stderr.startswith(f"act-exporter: {says.format(folder=folder)}")
        assert done.stderr.count("\n") == 1


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A guarded run of the user's model: step 3 was bad, and after 4 its down has a NaN."""
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
            detector.see_bad()
        if step == 4:
            with torch.no_grad():
                model.down.weight[0, 0] = torch.nan
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
                "mine:of_loader",
                "--checkpoint",
                checkpoint,
                "--batch",
                batch,
                "--json",
                "-",
            )
            assert done.exit_code == (when == "after"), done.output
            said = json.loads(done.stdout)
            assert said["profile"][0]["shape"] == [2, 4], "the batch of the file"
            found = {(one["fault"], one["layer"]) for one in said["findings"]}
            assert (("nonfinite-weight", "down") in found) is (when == "after")

    def test_a_function_that_takes_no_batch_gets_the_files_in_its_place(self, folder: Path) -> None:
        torch.save(torch.full((7, 4), 2.0), folder / "seven.pt")
        for target in ("mine:only_model", "mine:build"):
            done = doctor(target, "--batch", "seven.pt", "--json", "-")
            assert json.loads(done.stdout)["profile"][0]["shape"] == [7, 4]

    def test_another_models_checkpoint_is_refused(self, folder: Path, run_folder: Path) -> None:
        (folder / "other.py").write_text(
            "import torch\ndef build(): return torch.nn.Linear(4, 1), torch.ones(1, 4)"
        )
        checkpoint = run_folder / "checkpoints" / "step-00000002-g0"
        done = doctor("other:build", "--checkpoint", checkpoint)
        assert done.exit_code == 2
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
        done = doctor("mine:build", "--checkpoint", torn)
        assert done.exit_code == 2
        assert f"{torn} cannot be loaded: FileNotFoundError" in done.stderr
        assert done.stderr.count("\n") == 1
