"""deploy/compose: valid by the Compose Specification's schema, and true of what it names.

Docker's daemon does not run where these tests do, so no container was started.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from typing import Any

import pytest
import yaml

from deploy.demo.servers import REPOSITORY, binary

FOLDER = REPOSITORY / "deploy" / "compose"
COMPOSE = yaml.safe_load((FOLDER / "compose.yaml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]


def test_it_is_valid_by_the_specifications_schema() -> None:
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "check_jsonschema",
            "--builtin-schema",
            "vendor.compose-spec",
            FOLDER / "compose.yaml",
        ],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", SERVICES)
def test_a_service_comes_back_and_is_closed(name: str) -> None:
    service = SERVICES[name]
    assert service["restart"] == "unless-stopped"
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert "no-new-privileges:true" in service["security_opt"]


@pytest.mark.parametrize("name", ["prometheus", "alertmanager"])
def test_the_server_of_its_version_knows_its_flags(name: str) -> None:
    done = subprocess.run([binary(name), "--help"], capture_output=True, text=True)
    known = set(re.findall(r"--[a-z][\w.-]+", done.stdout + done.stderr))
    given = {flag.split("=")[0] for flag in SERVICES[name]["command"]}
    assert given <= known
    said = subprocess.run([binary(name), "--version"], capture_output=True, text=True)
    version = SERVICES[name]["image"].partition(":v")[2]
    assert f"version {version}" in said.stdout + said.stderr


def test_the_plain_files_are_mounted_where_they_look_for_each_other() -> None:
    for service in SERVICES.values():
        for volume in service["volumes"]:
            source = volume.split(":")[0]
            if source.startswith("."):
                assert (FOLDER / source).exists()
    alertmanager = (REPOSITORY / "alerting" / "alertmanager.yml").read_text()
    wanted = set(re.findall(r"^[^#\n]*_file: (\S+)$", alertmanager, re.MULTILINE))
    given = {secret["target"] for secret in SERVICES["alertmanager"]["secrets"]}
    assert given == wanted
    receiver = yaml.safe_load((REPOSITORY / "alerting" / "receiver.yml").read_text())
    (secret,) = SERVICES["receiver"]["secrets"]
    assert secret["target"] == receiver["token_file"]


def test_the_image_installs_what_the_receiver_needs() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    needed = set(project["dependencies"] + project["optional-dependencies"]["alerting"])
    trainers = {each for each in needed if each.startswith(("torch", "numpy"))}
    installed = set(re.findall(r'"(\S+>=\S+)"', (FOLDER / "Dockerfile").read_text()))
    assert installed == needed - trainers


def test_the_receiver_does_not_load_what_the_image_lacks() -> None:
    code = (
        "import sys; sys.modules['torch'] = sys.modules['numpy'] = None;"
        "import alerting.cli, alerting.serve, alerting.receiver"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
