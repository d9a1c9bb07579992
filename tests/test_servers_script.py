"""deploy/servers.sh: servers of one's own first, and one clear sentence where there are none."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from deploy.demo.servers import REPOSITORY, binary

PROGRAMS = ("prometheus", "promtool", "alertmanager", "amtool")
TOOLS = ("sh", "mkdir", "ln", "head", "cat", "sed", "chmod", "rm", "env")


def run(
    target: Path, path: list[Path], servers: Path | None = None
) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": ":".join(map(str, path))}
    if servers is not None:
        environment["ACT_SERVERS"] = str(servers)
    return subprocess.run(
        ["/bin/sh", REPOSITORY / "deploy" / "servers.sh", target],
        env=environment,
        capture_output=True,
        text=True,
        cwd=target.parent,
        timeout=60,
    )


@pytest.fixture
def tools(tmp_path: Path) -> Path:
    """A PATH with the shell's tools, but without apt-get and servers."""
    folder = tmp_path / "tools"
    folder.mkdir()
    for name in TOOLS:
        found = shutil.which(name)
        assert found is not None
        (folder / name).symlink_to(found)
    return folder


@pytest.fixture
def servers(tmp_path: Path) -> Path:
    """A folder with all four, Alertmanager under the name that Debian gives it."""
    folder = tmp_path / "servers"
    folder.mkdir()
    for name in PROGRAMS:
        own = "prometheus-alertmanager" if name == "alertmanager" else name
        (folder / own).symlink_to(binary(name))
    return folder


def linked(target: Path) -> set[str]:
    return {path.name for path in (target / "bin").iterdir() if path.exists()}


def test_those_on_the_path_are_taken(tmp_path: Path, tools: Path, servers: Path) -> None:
    done = run(tmp_path / "target", [tools, servers])
    assert done.returncode == 0, done.stderr
    assert linked(tmp_path / "target") == set(PROGRAMS)
    assert "prometheus, version" in done.stdout


def test_what_only_tests_need_is_taken_where_it_is(
    tmp_path: Path, tools: Path, servers: Path
) -> None:
    (servers / "prometheus-node-exporter").symlink_to(binary("promtool"))  # as Debian calls it
    (servers / "vmagent-prod").symlink_to(binary("promtool"))  # as upstream does
    done = run(tmp_path / "target", [tools, servers])
    assert done.returncode == 0, done.stderr
    assert linked(tmp_path / "target") == {*PROGRAMS, "node_exporter", "vmagent"}


def test_those_of_the_variable_are_taken(tmp_path: Path, tools: Path, servers: Path) -> None:
    done = run(tmp_path / "target", [tools], Path("servers"))  # relative to where it is run
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "target/bin/promtool").readlink() == servers / "promtool"


def test_a_variable_that_leads_nowhere_is_named(tmp_path: Path, tools: Path) -> None:
    done = run(tmp_path / "target", [tools], tmp_path / "nothing")
    assert done.returncode == 1
    assert done.stderr == (
        f"ACT_SERVERS={tmp_path / 'nothing'} must hold"
        " prometheus, promtool, alertmanager and amtool\n"
    )


def test_where_there_are_none_it_says_what_to_install(tmp_path: Path, tools: Path) -> None:
    done = run(tmp_path / "target", [tools])
    assert done.returncode == 1
    assert done.stderr.startswith("Install Prometheus and Alertmanager")
    assert "ACT_SERVERS" in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_second_run_does_nothing_until_the_choice_changes(
    tmp_path: Path, tools: Path, servers: Path
) -> None:
    target = tmp_path / "target"
    assert run(target, [tools, servers]).stdout
    assert run(target, [tools]).stdout == ""
    assert run(target, [tools], tmp_path / "nothing").returncode == 1
    assert run(target, [tools], servers).stdout


def test_a_newer_script_looks_again(tmp_path: Path, tools: Path, servers: Path) -> None:
    target = tmp_path / "target"
    assert run(target, [tools, servers]).stdout
    os.utime(target / ".ready", (0, 0))
    assert run(target, [tools, servers]).stdout


def test_a_link_that_leads_nowhere_any_more_is_made_anew(
    tmp_path: Path, tools: Path, servers: Path
) -> None:
    target = tmp_path / "target"
    assert run(target, [tools], servers).returncode == 0
    moved = servers.rename(tmp_path / "moved")
    assert run(target, [tools], servers).returncode == 1
    moved.rename(servers)
    assert run(target, [tools], servers).returncode == 0
