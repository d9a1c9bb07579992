"""What `act-alerting init` writes: the shipped receiver.yml for one folder, and secret files."""

from __future__ import annotations

import secrets
import shlex
from collections.abc import Sequence
from pathlib import Path

from alerting.exceptions import ConfigError
from alerting.shipped import shipped

CONFIG_NAME = "receiver.yml"
TOKEN_NAME = "receiver-token"  # noqa: S105  (a file's name)
TOKEN_BYTES = 32
"""As `openssl rand -hex 32` in the shipped file: 256 bits, which nobody guesses."""
BOT_FILES = {
    "feishu": ("url_file", "secret_file"),
    "dingtalk": ("url_file", "secret_file"),
    "wecom": ("url_file",),  # WeCom's bots have no signature
}
"""The chat tools that Alertmanager does not speak, and the files of an entry for each."""

_PATHS = {
    "\nruns: ../runs\n": "\nruns: runs\n",
    "\ndatabase: ../runs/receiver.sqlite\n": "\ndatabase: receiver.sqlite\n",
    f"/etc/act/{TOKEN_NAME}": TOKEN_NAME,
}
"""Paths in the shipped file, and what they are where everything is beside the config."""


def write_folder(folder: Path, bots: Sequence[str], language: str) -> list[Path]:
    """Write a config, a random token, and an entry with empty secret files for each bot.

    Args:
        folder: where; created where missing, and the folder `runs` in it.
        bots: keys of `BOT_FILES`.
        language: of the bots' messages; one of `phrases.LANGUAGES`.

    Returns:
        The files that were written.

    Raises:
        ConfigError: one of them is there already, or could not be written.
    """
    files = {CONFIG_NAME: "", TOKEN_NAME: f"{secrets.token_hex(TOKEN_BYTES)}\n"}
    entries = ""
    for bot in dict.fromkeys(bots):
        entries += f"  - kind: {bot}\n"
        for key in BOT_FILES[bot]:
            name = f"{bot}-{key.removesuffix('_file')}"
            entries += f"    {key}: {name}\n"
            files[name] = ""
        entries += f"    language: {language}\n"
    files[CONFIG_NAME] = _config(entries)
    paths = [folder / name for name in files]
    for path in paths:
        if path.exists() or path.is_symlink():
            raise ConfigError(f"{path} exists; nothing was written.")
    try:
        (folder / "runs").mkdir(parents=True, exist_ok=True)
        for path, content in zip(paths, files.values(), strict=True):
            # The config holds no secret, only their places.
            _write(path, content, 0o644 if path.name == CONFIG_NAME else 0o600)
    except OSError as error:
        raise ConfigError(f"{error.filename} cannot be written: {error.strerror}.") from error
    return paths


def next_commands(folder: Path, bots: Sequence[str]) -> list[str]:
    """Three command lines that lead from the written files to a running receiver."""

    def quoted(name: str) -> str:
        return shlex.quote(str(folder / name))

    config = f"--config {quoted(CONFIG_NAME)}"
    serve = f"act-alerting serve {config}"
    if not bots:
        # Alertmanager runs as another user and reads a copy of its own.
        copy = f"sudo install -D -m 0400 -o prometheus {quoted(TOKEN_NAME)}"
        ready = "curl http://127.0.0.1:9464/readyz"
        return [f"{copy} /etc/act/alertmanager-token", serve, ready]
    names = [
        quoted(f"{bot}-{key.removesuffix('_file')}")
        for bot in dict.fromkeys(bots)
        for key in BOT_FILES[bot]
    ]
    edit = f"${{EDITOR:-vi}} {' '.join(names)}  # the bot's address and secret, a line each"
    return [edit, f"act-alerting send-test {config}", serve]


def _config(entries: str) -> str:
    text = shipped(f"alerting/{CONFIG_NAME}").read_text(encoding="utf-8")
    for path, ours in _PATHS.items():
        text = text.replace(path, ours)
    return text.replace("\nnotify:\n", f"\nnotify:\n{entries}")


def _write(path: Path, content: str, mode: int) -> None:
    # Should somebody have made it since it was looked for, theirs stays.
    path.touch(mode=mode, exist_ok=False)
    path.write_text(content, encoding="utf-8")
