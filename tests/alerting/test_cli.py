"""`act-alerting` as a user meets it: help that teaches, mistakes in one sentence, a clean end."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import requests
import yaml

from deploy.demo.servers import REPOSITORY, free_port, running
from tests.alerting.bots import KEY, SECRET, Bot, DingTalkBot, FeishuBot, WeComBot

TOKEN = "correct-horse-battery-staple"
COMMAND = Path(sys.executable).with_name("act-alerting")


def run(*arguments: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [COMMAND, *map(str, arguments)],
        # A width of its own: the test must not depend on the terminal that it runs in.
        env={"COLUMNS": "100", "PATH": "/usr/bin:/bin", **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """A complete config file for a free port."""
    (tmp_path / "runs").mkdir()
    (tmp_path / "token").write_text(TOKEN)
    (tmp_path / "token").chmod(0o600)
    path = tmp_path / "receiver.yml"
    content = {
        "listen": f"127.0.0.1:{free_port()}",
        "runs": "runs",
        "database": "receiver.sqlite",
        "token_file": "token",
    }
    path.write_text(yaml.safe_dump(content))
    return path


def address(config: Path) -> str:
    return f"http://{yaml.safe_load(config.read_text())['listen']}"


class TestHelp:
    def test_teaches_with_an_example(self) -> None:
        answer = run("serve", "--help")
        assert answer.returncode == 0
        assert "act-alerting serve --runs runs" in answer.stdout
        assert "umask 077" in answer.stdout
        for option in ("--config", "--listen", "--runs", "--database", "--token-file"):
            assert option in answer.stdout

    def test_without_a_command_lists_them(self) -> None:
        answer = run()
        assert "serve" in answer.stdout + answer.stderr

    def test_version(self) -> None:
        answer = run("--version")
        assert answer.returncode == 0
        assert answer.stdout.startswith("act-alerting 0.")


class TestMistakes:
    def test_a_wrong_config_is_2_and_one_sentence(self, config: Path) -> None:
        config.write_text(config.read_text() + "databse: x\n")
        answer = run("serve", "--config", config)
        assert answer.returncode == 2
        assert answer.stderr == (
            f"act-alerting: {config}: unknown key 'databse'; did you mean database?\n"
        )

    def test_listening_to_the_world_is_refused(self, config: Path) -> None:
        answer = run("serve", "--config", config, "--listen", "0.0.0.0:0")
        assert answer.returncode == 2
        assert "--listen: 0.0.0.0 can be reached from other machines" in answer.stderr
        assert answer.stderr.count("\n") == 1

    def test_an_address_of_another_machine(self, config: Path) -> None:
        config.write_text(config.read_text() + "allow_remote: true\n")
        answer = run("serve", "--config", config, "--listen", "192.0.2.1:9464")
        assert answer.returncode == 1
        assert "Cannot listen on 192.0.2.1:9464" in answer.stderr

    def test_a_port_in_use_is_1(self, config: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
            answer = run("serve", "--config", config, "--listen", f"127.0.0.1:{port}")
        assert answer.returncode == 1
        assert answer.stderr == (
            f"act-alerting: Cannot listen on 127.0.0.1:{port}: Address already in use.\n"
        )
        assert not (config.parent / "receiver.sqlite").exists()

    def test_a_database_of_something_else_is_2(self, config: Path) -> None:
        (config.parent / "receiver.sqlite").write_text("no database at all\n" * 100)
        answer = run("serve", "--config", config)
        assert answer.returncode == 2
        assert "receiver.sqlite cannot be used" in answer.stderr
        assert "Traceback" not in answer.stderr

    def test_an_open_token_file_is_2_with_the_command_to_run(self, config: Path) -> None:
        (config.parent / "token").chmod(0o644)
        answer = run("serve", "--config", config)
        assert answer.returncode == 2
        assert f"run `chmod 600 {config.parent / 'token'}`" in answer.stderr

    def test_an_unknown_log_level_is_2(self, config: Path) -> None:
        answer = run("serve", "--config", config, ACT_LOG_LEVEL="loud")
        assert answer.returncode == 2
        assert answer.stderr.startswith("act-alerting: ACT_LOG_LEVEL: must be one of DEBUG, INFO")

    def test_without_the_extra_it_says_what_to_install(self, tmp_path: Path) -> None:
        """Run by an interpreter that finds neither typer nor fastapi."""
        blocked = "import importlib.util as u; find = u.find_spec; " + (
            "u.find_spec = lambda name: None if name in ('typer', 'fastapi') else find(name); "
            "from alerting.cli import main; main()"
        )
        answer = subprocess.run(
            [sys.executable, "-c", blocked],
            cwd=REPOSITORY,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert answer.returncode == 1
        assert answer.stderr == (
            "act-alerting: not installed: typer, fastapi. "
            "Run: pip install 'act-exporter[alerting]'\n"
        )

    def test_importing_the_command_imports_none_of_the_extra(self) -> None:
        check = (
            "import alerting.cli, sys; extra = "
            "{'typer', 'fastapi', 'uvicorn', 'pydantic', 'requests'}; "
            "sys.exit(bool(extra & set(sys.modules)))"
        )
        assert subprocess.run([sys.executable, "-c", check], cwd=REPOSITORY).returncode == 0


class TestSendTest:
    def config(self, folder: Path, **bots: Bot) -> Path:
        """A config that has nobody but these bots."""
        entries = []
        for kind, bot in bots.items():
            entry = {"kind": kind, "name": f"our-{kind}", "language": "zh"}
            files = {"url_file": bot.url}
            if kind != "wecom":
                files["secret_file"] = SECRET
            for key, content in files.items():
                entry[key] = f"{kind}-{key}"
                (folder / entry[key]).write_text(content)
                (folder / entry[key]).chmod(0o600)
            entries.append(entry)
        path = folder / "receiver.yml"
        path.write_text(yaml.safe_dump({"notify": entries}))
        return path

    def test_each_takes_one_signed_message(self, tmp_path: Path) -> None:
        with (
            FeishuBot().serving() as feishu,
            DingTalkBot().serving() as dingtalk,
            WeComBot().serving() as wecom,
        ):
            config = self.config(tmp_path, feishu=feishu, dingtalk=dingtalk, wecom=wecom)
            answer = run("send-test", "--config", config)
            assert answer.returncode == 0
            assert answer.stderr == ""
            assert answer.stdout.splitlines() == [
                "our-feishu (feishu): taken (HTTP 200, code 0)",
                "our-dingtalk (dingtalk): taken (HTTP 200, code 0)",
                "our-wecom (wecom): taken (HTTP 200, code 0)",
            ]
            for bot in (feishu, dingtalk, wecom):
                (text,) = bot.texts()
                assert "测试消息" in text

    def test_one_that_refuses_is_1_and_says_what_to_change(self, tmp_path: Path) -> None:
        with FeishuBot(secret="SECother").serving() as feishu, WeComBot().serving() as wecom:
            config = self.config(tmp_path, feishu=feishu, wecom=wecom)
            answer = run("send-test", "--config", config)
            assert answer.returncode == 1
            refused, taken = answer.stdout.splitlines()
            assert refused.startswith("our-feishu (feishu): not taken: error 19021: the signature")
            assert "secret_file" in refused
            assert "taken (HTTP 200" in taken
            for secret in (KEY, SECRET):
                assert secret not in answer.stdout + answer.stderr

            assert run("send-test", "--config", config, "--only", "our-wecom").returncode == 0
            assert len(feishu.posts) == 1

    def test_a_name_that_is_not_there_is_2(self, tmp_path: Path) -> None:
        with WeComBot().serving() as wecom:
            config = self.config(tmp_path, wecom=wecom)
            answer = run("send-test", "--config", config, "--only", "nobody")
        assert answer.returncode == 2
        assert "no target 'nobody'; it has our-wecom." in answer.stderr

    def test_nobody_to_send_to_is_2(self, config: Path) -> None:
        answer = run("send-test", "--config", config)
        assert answer.returncode == 2
        assert answer.stderr == f"act-alerting: {config}: notify: lists nobody to send to.\n"


class TestServing:
    @pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
    def test_a_signal_ends_it_cleanly(self, config: Path, number: signal.Signals) -> None:
        environment = {"ACT_RECEIVER_CONFIG": str(config)}
        with running("receiver", [COMMAND, "serve"], config.parent, env=environment) as server:
            server.wait_for(
                lambda: requests.get(f"{address(config)}/readyz", timeout=10).ok, "readiness"
            )
            # A connection that a client keeps open must not keep it alive.
            with socket.create_connection(
                ("127.0.0.1", int(address(config).rpartition(":")[2]))
            ) as idle:
                idle.sendall(b"POST /alerts HTTP/1.1\r\n")
                server.process.send_signal(number)
                assert server.process.wait(60) == 0
            log = server.log.read_text()
            assert f"Listening on {address(config)}" in log
            assert log.rstrip().endswith("Ended.")
            assert "Traceback" not in log
        # Closed properly, SQLite leaves one file.
        assert not (config.parent / "receiver.sqlite-wal").exists()

    def test_the_log_level_comes_from_the_environment(self, config: Path) -> None:
        environment = {"ACT_LOG_LEVEL": "warning"}
        argv = [COMMAND, "serve", "--config", config]
        with running("receiver", argv, config.parent, env=environment) as server:
            server.wait_for(
                lambda: requests.get(f"{address(config)}/readyz", timeout=10).ok, "readiness"
            )
            requests.post(f"{address(config)}/alerts", data="{}", timeout=10)
            server.wait_for(lambda: "rejected with 401" in server.log.read_text(), "the warning")
            assert "INFO" not in server.log.read_text()
