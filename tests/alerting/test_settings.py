"""The receiver's settings: each mistake is one sentence with the key and the file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from alerting.exceptions import ConfigError
from alerting.settings import (
    DEFAULT_ALERTS,
    DEFAULT_BACKUP_INTERVAL_SECONDS,
    DEFAULT_LISTEN,
    DEFAULT_REPEAT_INTERVAL_SECONDS,
    DEFAULT_REQUEST_DEADLINE_SECONDS,
    DEFAULT_WATCHDOG_SECONDS,
    KEYS,
    load_settings,
    load_targets,
)
from alerting.targets import TARGET_KEYS
from deploy.demo.servers import REPOSITORY

SHIPPED = REPOSITORY / "alerting" / "receiver.yml"
TOKEN = "correct-horse-battery-staple"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a token file and an empty runs folder."""
    (tmp_path / "token").write_text(f"{TOKEN}\n")
    (tmp_path / "token").chmod(0o600)
    (tmp_path / "runs").mkdir()
    return tmp_path


def write(folder: Path, **changes: Any) -> Path:
    content = {"runs": "runs", "database": "receiver.sqlite", "token_file": "token"} | changes
    path = folder / "receiver.yml"
    path.write_text(yaml.safe_dump(content))
    return path


class TestShippedFile:
    def test_has_every_key_and_the_defaults(self, folder: Path) -> None:
        content = yaml.safe_load(SHIPPED.read_text())
        assert set(content) == set(KEYS)
        assert content["listen"] == DEFAULT_LISTEN
        assert tuple(content["alerts"]) == DEFAULT_ALERTS
        assert content["backup_interval_seconds"] == DEFAULT_BACKUP_INTERVAL_SECONDS
        assert content["allow_remote"] is False
        assert content["repeat_interval_seconds"] == DEFAULT_REPEAT_INTERVAL_SECONDS
        assert content["watchdog_seconds"] == DEFAULT_WATCHDOG_SECONDS
        assert content["request_deadline_seconds"] == DEFAULT_REQUEST_DEADLINE_SECONDS
        assert content["escalate"] is None
        assert content["mode"] == "act"
        assert content["shared"] is None

    def test_loads_once_there_is_a_token(self, folder: Path) -> None:
        settings = load_settings(SHIPPED, {"token_file": folder / "token"})
        assert (settings.host, settings.port) == ("127.0.0.1", 9464)
        assert settings.runs == REPOSITORY / "alerting" / "../runs"


class TestValues:
    def test_paths_are_relative_to_the_file(self, folder: Path) -> None:
        settings = load_settings(write(folder), {})
        assert settings.runs == folder / "runs"
        assert settings.database == folder / "receiver.sqlite"
        assert settings.token == TOKEN

    def test_the_command_line_wins_and_is_relative_to_where_one_is(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (folder / "here").mkdir()
        monkeypatch.chdir(folder / "here")
        options = {"listen": "127.0.0.1:0", "database": Path("other.sqlite"), "runs": None}
        settings = load_settings(write(folder, listen="127.0.0.1:1000"), options)
        assert settings.port == 0
        assert settings.database == folder / "here" / "other.sqlite"
        assert settings.runs == folder / "runs"

    def test_the_command_line_alone_is_enough(self, folder: Path) -> None:
        options = {name: folder / name for name in ("runs", "database")}
        settings = load_settings(None, {**options, "token_file": folder / "token"})
        assert settings.alerts == set(DEFAULT_ALERTS)
        assert settings.backup_interval_seconds == DEFAULT_BACKUP_INTERVAL_SECONDS

    @pytest.mark.parametrize(
        ("listen", "host", "port"),
        [
            ("127.0.0.1:9464", "127.0.0.1", 9464),
            ("127.8.0.1:1", "127.8.0.1", 1),
            ("localhost:0", "localhost", 0),
            ("[::1]:9464", "::1", 9464),
        ],
    )
    def test_loopback_addresses(self, folder: Path, listen: str, host: str, port: int) -> None:
        settings = load_settings(write(folder, listen=listen), {})
        assert (settings.host, settings.port) == (host, port)

    def test_elsewhere_only_when_it_is_allowed(self, folder: Path) -> None:
        settings = load_settings(write(folder, listen="0.0.0.0:9464", allow_remote=True), {})
        assert settings.host == "0.0.0.0"

    def test_the_token_is_in_no_printed_form(self, folder: Path) -> None:
        assert TOKEN not in repr(load_settings(write(folder), {}))


@pytest.mark.filterwarnings("ignore:'imghdr' is deprecated:DeprecationWarning")  # Apprise's own
class TestTargets:
    def test_the_commented_example_works_once_its_files_are_there(self, folder: Path) -> None:
        pytest.importorskip("apprise")
        text = SHIPPED.read_text().replace("/etc/act/", "").replace("\n  # ", "\n  ")
        (folder / "receiver.yml").write_text(text)
        entries = yaml.safe_load(text)["notify"]
        assert {key for entry in entries for key in entry} == set(TARGET_KEYS)
        for entry in entries:
            for key in ("url_file", "secret_file"):
                if key in entry:
                    content = "SECabc" if key == "secret_file" else "https://a.example/hook"
                    content = "json://a.example/hook" if "telegram" in entry[key] else content
                    _secret(folder, entry[key], content)
        _secret(folder, "receiver-token", TOKEN)
        settings = load_settings(folder / "receiver.yml", {})
        assert [(target.name, target.language) for target in settings.notify] == [
            ("oncall", "zh"),
            ("dingtalk", "zh"),
            ("wecom", "zh"),
            ("webhook", "en"),
            ("telegram", "en"),
        ]
        assert [target.kind for target in load_targets(folder / "receiver.yml")] == [
            "feishu",
            "dingtalk",
            "wecom",
            "webhook",
            "apprise",
        ]

    def test_none_is_no_mistake_for_the_receiver_and_one_for_sending(self, folder: Path) -> None:
        assert load_settings(write(folder), {}).notify == ()
        with pytest.raises(ConfigError, match="notify: lists nobody"):
            load_targets(write(folder, notify=[]))

    def test_loopback_may_be_http(self, folder: Path) -> None:
        url = _secret(folder, "url", "http://127.0.0.1:80/hook")
        config = write(folder, notify=[{"kind": "webhook", "url_file": url}])
        assert load_settings(config, {}).notify[0].name == "webhook"

    def test_addresses_and_secrets_are_in_no_printed_form(self, folder: Path) -> None:
        url = _secret(folder, "url", "https://a.example/4711")
        entry = {"kind": "feishu", "url_file": url, "secret_file": "token"}
        shown = repr(load_settings(write(folder, notify=[entry]), {}))
        assert "4711" not in shown
        assert TOKEN not in shown


def _secret(folder: Path, name: str, content: str) -> str:
    (folder / name).write_text(content)
    (folder / name).chmod(0o600)
    return name


class TestMistakes:
    @pytest.mark.parametrize(
        ("changes", "sentence"),
        [
            ({"listen": "9464"}, "listen: must be HOST:PORT"),
            ({"listen": 9464}, "listen: must be HOST:PORT"),
            ({"listen": "127.0.0.1:http"}, "listen: must be HOST:PORT"),
            ({"listen": "127.0.0.1:70000"}, "listen: there is no port 70000"),
            ({"listen": "::1:9464"}, "listen: an IPv6 address needs brackets"),
            ({"listen": "0.0.0.0:9464"}, "listen: 0.0.0.0 can be reached from other machines"),
            ({"listen": "[::]:9464"}, "listen: :: can be reached from other machines"),
            ({"listen": "trainer.example:9464"}, "allow_remote: true"),
            ({"allow_remote": "yes"}, "allow_remote: must be true or false"),
            ({"runs": 5}, "runs: must be a path"),
            ({"runs": "token"}, "runs: .*token is not a folder"),
            ({"runs": None}, "runs is set neither in .*receiver.yml nor as --runs"),
            ({"database": ""}, "database: must be a path"),
            ({"alerts": "ActRunaway"}, "alerts: must be a list of alert names"),
            ({"alerts": [5]}, "alerts: must be a list of alert names"),
            ({"alerts": []}, "alerts: is empty"),
            ({"backup_interval_seconds": "15m"}, "backup_interval_seconds: must be a number"),
            ({"backup_interval_seconds": True}, "backup_interval_seconds: must be a number"),
            ({"backup_interval_seconds": -1}, "backup_interval_seconds: must be 0 or more"),
            ({"backup_interval_seconds": float("nan")}, "must be 0 or more"),
            ({"token_file": "none"}, "token_file: .*none cannot be read: No such file"),
            ({"token_file": "runs"}, "token_file: .*runs is not a file"),
            ({"dashboard_url": 5}, "dashboard_url: must be an address such as https"),
            ({"dashboard_url": "javascript:x"}, "dashboard_url: must be an address"),
            ({"repeat_interval_seconds": "1h"}, "repeat_interval_seconds: must be a number"),
            ({"watchdog_seconds": 0}, "watchdog_seconds: must be more than 0"),
            ({"request_deadline_seconds": 0}, "request_deadline_seconds: must be more than 0"),
            ({"escalate": "restart now"}, "escalate: must be a list of a program and its arg"),
            ({"escalate": ["restart", 5]}, "escalate: must be a list of a program and its arg"),
            ({"escalate": [""]}, "escalate: names no program"),
            ({"mode": "dry-run"}, "mode: must be one of act, notify-only, not 'dry-run'"),
            ({"token_fil": "token"}, "unknown key 'token_fil'; did you mean token_file"),
            ({"colour": "blue"}, "unknown key 'colour'; known are listen"),
        ],
    )
    def test_names_key_and_reason(
        self, folder: Path, changes: dict[str, Any], sentence: str
    ) -> None:
        with pytest.raises(ConfigError, match=sentence) as caught:
            load_settings(write(folder, **changes), {})
        assert "receiver.yml" in str(caught.value)

    @pytest.mark.parametrize(
        ("entry", "sentence"),
        [
            ("feishu", "notify: entry 1: must have keys and values"),
            ({}, "notify: entry 1: kind: must be one of feishu, dingtalk, .* not None"),
            ({"kind": "slack"}, "notify: entry 1: kind: must be one of feishu"),
            ({"kind": ["feishu"]}, "notify: entry 1: kind: must be one of feishu"),
            ({"kind": "feishu"}, "notify: entry 1: url_file is missing"),
            (
                {"kind": "feishu", "url": "x"},
                "entry 1: unknown key 'url'; known are kind, name, url_file",
            ),
            ({"kind": "feishu", "url_file": "none"}, "url_file: .*none cannot be read"),
            ({"kind": "feishu", "url_file": "open"}, "url_file: .*run `chmod 600"),
            ({"kind": "feishu", "url_file": "token"}, "url_file: the file holds no address"),
            ({"kind": "feishu", "url_file": "plain"}, "url_file: the address .* must be https"),
            ({"kind": "feishu", "url_file": "broken"}, "url_file: the file holds no address"),
            ({"kind": "feishu", "url_file": "url", "secret_file": "open"}, "secret_file: .*chmod"),
            ({"kind": "feishu", "url_file": "url", "language": "fr"}, "language: must be one of"),
            ({"kind": "feishu", "url_file": "url", "name": "a b"}, "name: must be a word"),
            ({"kind": "wecom", "url_file": "url", "secret_file": "token"}, "secret_file: A WeCom"),
        ],
    )
    def test_an_entry_of_notify_is_named_and_no_secret_shown(
        self, folder: Path, entry: Any, sentence: str
    ) -> None:
        secret = "https://open.feishu.cn/hook/4711"
        for name, content in {
            "url": secret,
            "open": secret,
            "plain": secret.replace("https", "http"),
            "broken": "https://[4711",
        }.items():
            (folder / name).write_text(content)
            (folder / name).chmod(0o644 if name == "open" else 0o600)
        with pytest.raises(ConfigError, match=sentence) as caught:
            load_settings(write(folder, notify=[entry]), {})
        assert "4711" not in str(caught.value)
        assert TOKEN not in str(caught.value)

    def test_notify_that_is_no_list(self, folder: Path) -> None:
        with pytest.raises(ConfigError, match="notify: must be a list"):
            load_settings(write(folder, notify="feishu"), {})

    def test_two_targets_of_one_name(self, folder: Path) -> None:
        entry = {"kind": "wecom", "url_file": _secret(folder, "url", "https://a.example/4711")}
        with pytest.raises(ConfigError, match="two entries have the name wecom; give one"):
            load_settings(write(folder, notify=[entry, entry]), {})

    @pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o644])
    def test_a_token_that_others_may_touch(self, folder: Path, mode: int) -> None:
        (folder / "token").chmod(mode)
        with pytest.raises(ConfigError, match=f"run `chmod 600 {folder / 'token'}`"):
            load_settings(write(folder), {})

    @pytest.mark.parametrize(
        ("content", "reason"),
        [
            (b"", "is empty"),
            (b" \n\n", "is empty"),
            (b"two words", "one line of printable ASCII"),
            (b"two\nlines", "one line of printable ASCII"),
            (b"caf\xc3\xa9", "one line of printable ASCII"),
            (b"x" * 5000, "too large"),
        ],
    )
    def test_a_token_that_is_none_is_not_shown(
        self, folder: Path, content: bytes, reason: str
    ) -> None:
        (folder / "token").write_bytes(content)
        with pytest.raises(ConfigError, match=reason) as caught:
            load_settings(write(folder), {})
        assert content.decode().strip() == "" or content.decode() not in str(caught.value)

    @pytest.mark.parametrize(
        ("content", "sentence"),
        [
            (b"runs: [", r"receiver\.yml is not valid YAML: .* \(line \d\)"),
            (b"runs: \xff\xfe", r"receiver\.yml is not valid YAML"),
            (b"- runs", r"receiver\.yml must hold keys and values"),
            (b"", "runs is set neither"),
        ],
    )
    def test_a_mangled_file(self, folder: Path, content: bytes, sentence: str) -> None:
        path = folder / "receiver.yml"
        path.write_bytes(content)
        with pytest.raises(ConfigError, match=sentence):
            load_settings(path, {})

    def test_a_missing_file(self, folder: Path) -> None:
        with pytest.raises(ConfigError, match=r"none\.yml cannot be read: No such file"):
            load_settings(folder / "none.yml", {})
