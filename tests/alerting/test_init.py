"""`act-alerting init`: what it writes can be used as it is, and nothing that exists is lost."""

from __future__ import annotations

import shlex
import stat
from pathlib import Path

import pytest
import yaml

from alerting.settings import load_settings, load_targets
from tests.alerting.bots import SECRET
from tests.alerting.test_cli import run
from tests.alerting.test_settings import SHIPPED

URL = "https://a.example/4711"


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


class TestWritten:
    def test_the_receiver_takes_it_as_it_is(self, tmp_path: Path) -> None:
        folder = tmp_path / "new" / "folder"
        answer = run("init", folder)
        assert answer.returncode == 0, answer.stderr
        settings = load_settings(folder / "receiver.yml", {})
        assert settings.runs == folder / "runs"
        assert settings.runs.is_dir()
        assert settings.database == folder / "receiver.sqlite"
        assert settings.notify == ()

    def test_it_differs_from_the_shipped_file_in_paths_only(self, tmp_path: Path) -> None:
        run("init", tmp_path)
        text = (tmp_path / "receiver.yml").read_text()
        shipped, ours = yaml.safe_load(SHIPPED.read_text()), yaml.safe_load(text)
        assert {key for key in shipped if ours[key] != shipped[key]} == {
            "runs",
            "database",
            "token_file",
        }
        assert text.count("#") == SHIPPED.read_text().count("#")

    def test_the_token_is_random_and_for_its_owner_alone(self, tmp_path: Path) -> None:
        tokens = set()
        for name in ("one", "two"):
            run("init", tmp_path / name)
            token = tmp_path / name / "receiver-token"
            assert mode(token) == 0o600
            tokens.add(token.read_text().strip())
        assert len(tokens) == 2
        assert all(len(bytes.fromhex(token)) == 32 for token in tokens)

    def test_bots_have_entries_and_secret_files_to_fill_in(self, tmp_path: Path) -> None:
        kinds = ("feishu", "dingtalk", "wecom")
        options = [part for kind in kinds for part in ("--bot", kind)]
        answer = run("init", tmp_path, *options, "--language", "zh")
        assert answer.returncode == 0, answer.stderr
        secret_files = sorted(path.name for path in tmp_path.glob("*-*"))
        assert secret_files == [
            "dingtalk-secret",
            "dingtalk-url",
            "feishu-secret",
            "feishu-url",
            "receiver-token",
            "wecom-url",
        ]
        for name in secret_files:
            assert mode(tmp_path / name) == 0o600
            if name != "receiver-token":
                assert (tmp_path / name).read_text() == ""
                (tmp_path / name).write_text(URL if name.endswith("url") else SECRET)
        targets = load_targets(tmp_path / "receiver.yml")
        assert [(target.kind, target.language) for target in targets] == [(k, "zh") for k in kinds]

    def test_a_file_that_is_still_empty_is_named(self, tmp_path: Path) -> None:
        run("init", tmp_path, "--bot", "wecom")
        answer = run("send-test", "--config", tmp_path / "receiver.yml")
        assert answer.returncode == 2
        assert f"url_file: {tmp_path / 'wecom-url'} is empty." in answer.stderr


class TestNextCommands:
    def printed(self, *arguments: str | Path) -> list[list[str]]:
        answer = run("init", *arguments)
        assert answer.returncode == 0, answer.stderr
        _, _, commands = answer.stdout.partition("Next:\n")
        return [shlex.split(line, comments=True) for line in commands.splitlines()]

    def test_with_a_bot(self, tmp_path: Path) -> None:
        folder = tmp_path / "with space"
        edit, send, serve = self.printed(folder, "--bot", "feishu")
        assert edit[1:] == [str(folder / "feishu-url"), str(folder / "feishu-secret")]
        config = str(folder / "receiver.yml")
        assert send == ["act-alerting", "send-test", "--config", config]
        assert serve == ["act-alerting", "serve", "--config", config]

    def test_without_a_bot(self, tmp_path: Path) -> None:
        copy, serve, _ready = self.printed(tmp_path)
        assert copy[-2:] == [str(tmp_path / "receiver-token"), "/etc/act/alertmanager-token"]
        assert serve == ["act-alerting", "serve", "--config", str(tmp_path / "receiver.yml")]


class TestMistakes:
    @pytest.mark.parametrize("name", ["receiver.yml", "receiver-token", "feishu-secret"])
    def test_what_exists_is_kept_and_nothing_is_written(self, tmp_path: Path, name: str) -> None:
        (tmp_path / name).write_text("mine")
        answer = run("init", tmp_path, "--bot", "feishu")
        assert answer.returncode == 1
        assert answer.stderr == f"act-alerting: {tmp_path / name} exists; nothing was written.\n"
        assert [path.name for path in tmp_path.iterdir()] == [name]
        assert (tmp_path / name).read_text() == "mine"

    def test_a_link_that_leads_nowhere_is_something(self, tmp_path: Path) -> None:
        (tmp_path / "receiver-token").symlink_to(tmp_path / "elsewhere")
        assert run("init", tmp_path).returncode == 1
        assert not (tmp_path / "elsewhere").exists()

    def test_a_file_in_the_folders_place(self, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        answer = run("init", tmp_path / "file")
        assert answer.returncode == 1
        assert "cannot be written" in answer.stderr
        assert "Traceback" not in answer.stderr

    def test_what_it_does_not_know(self, tmp_path: Path) -> None:
        answer = run("init", tmp_path, "--bot", "slack")
        assert answer.returncode == 2
        assert "--bot: must be one of feishu, dingtalk, wecom, not 'slack'." in answer.stderr
        answer = run("init", tmp_path, "--language", "fr")
        assert answer.returncode == 2
        assert list(tmp_path.iterdir()) == []
