"""The file by which Prometheus finds a rank."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import requests
from torch import nn

from act_exporter import start_exporter
from act_exporter.targets import STALE_SECONDS, TargetFile, remove_stale

ADDRESS = 'run="r", rank="0", scheme="http", host="::1", port=1'
RUN = 'gpt "7b"/été'


def target_file(folder: Path, *, host: str = "127.0.0.1", port: int = 9460, rank: str = "0"):
    return TargetFile(folder, run=RUN, rank=rank, scheme="http", host=host, port=port)


def listed(folder: Path) -> list[dict]:
    """What Prometheus would find by `*.json`."""
    return [
        group for path in sorted(folder.glob("*.json")) for group in json.loads(path.read_text())
    ]


class TestWriting:
    def test_lists_the_address_with_run_and_rank(self, tmp_path):
        target_file(tmp_path / "targets").write()
        assert listed(tmp_path / "targets") == [
            {
                "targets": ["127.0.0.1:9460"],
                "labels": {"run": RUN, "rank": "0", "__scheme__": "http"},
            }
        ]

    def test_each_rank_has_its_own(self, tmp_path):
        for rank in range(3):
            target_file(tmp_path, port=9460 + rank, rank=str(rank)).write()
        assert {group["targets"][0] for group in listed(tmp_path)} == {
            "127.0.0.1:9460",
            "127.0.0.1:9461",
            "127.0.0.1:9462",
        }

    def test_ipv6_has_brackets(self, tmp_path):
        target_file(tmp_path, host="::1").write()
        assert listed(tmp_path)[0]["targets"] == ["[::1]:9460"]

    @pytest.mark.parametrize("host", ["0.0.0.0", "::"])
    def test_all_addresses_are_listed_by_the_machines_name(self, tmp_path, host):
        target_file(tmp_path, host=host).write()
        assert listed(tmp_path)[0]["targets"] == [f"{socket.gethostname()}:9460"]

    def test_leaves_nothing_else_behind(self, tmp_path):
        target_file(tmp_path).write()
        assert len(list(tmp_path.iterdir())) == 1

    def test_others_may_read_it(self, tmp_path):
        before = os.umask(0o077)
        try:
            target_file(tmp_path).write()
        finally:
            os.umask(before)
        assert next(tmp_path.iterdir()).stat().st_mode & 0o777 == 0o644


class TestRemoving:
    def test_takes_it_away(self, tmp_path):
        target = target_file(tmp_path)
        target.write()
        target.remove()
        assert list(tmp_path.iterdir()) == []
        target.remove()

    def test_not_that_of_the_process_that_came_after(self, tmp_path):
        former, later = target_file(tmp_path), target_file(tmp_path, port=9999)
        former.write()
        later.write()
        former.remove()
        assert listed(tmp_path)[0]["targets"] == ["127.0.0.1:9999"]

    def test_at_the_end_of_a_process_but_not_of_its_child(self, tmp_path):
        script = (
            "import os, sys; from pathlib import Path\n"
            "from act_exporter.targets import TargetFile\n"
            f"t = TargetFile(Path({str(tmp_path)!r}), {ADDRESS})\n"
            "t.write()\n"
            "child = os.fork()\n"
            "if child == 0: sys.exit()\n"
            "os.waitpid(child, 0); print(len(list(Path(t._path).parent.iterdir())))\n"
        )
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
        assert done.stdout == "1\n", done.stderr
        assert list(tmp_path.iterdir()) == []

    def test_stays_where_the_process_was_killed(self, tmp_path):
        script = (
            "import os, signal; from pathlib import Path\n"
            "from act_exporter.targets import TargetFile\n"
            f"TargetFile(Path({str(tmp_path)!r}), {ADDRESS}).write()\n"
            "os.kill(os.getpid(), signal.SIGKILL)\n"
        )
        done = subprocess.run([sys.executable, "-c", script])
        assert done.returncode == -signal.SIGKILL
        assert len(listed(tmp_path)) == 1


class TestStale:
    def test_one_that_nobody_refreshes_is_removed(self, tmp_path):
        target_file(tmp_path, rank="0").write()
        target_file(tmp_path, rank="1", port=2).write()
        old = time.time() - STALE_SECONDS - 1
        path = next(path for path in tmp_path.iterdir() if "rank1" in path.name)
        os.utime(path, (old, old))
        assert remove_stale(tmp_path) == [path]
        assert [group["labels"]["rank"] for group in listed(tmp_path)] == ["0"]

    def test_files_of_others_are_left_alone(self, tmp_path):
        other = tmp_path / "node-exporter.json"
        other.write_text("[]")
        os.utime(other, (0, 0))
        assert remove_stale(tmp_path) == []
        assert other.exists()

    def test_a_process_that_was_taken_for_gone_lists_itself_again(self, tmp_path):
        target = target_file(tmp_path)
        target.write()
        next(tmp_path.iterdir()).unlink()
        target._due = 0.0
        target.refresh()
        assert len(listed(tmp_path)) == 1


class TestWithAnExporter:
    def test_a_folder_that_cannot_be_written_is_counted_and_the_page_is_served(
        self, tmp_path, caplog
    ):
        (tmp_path / "file").write_text("no folder")
        with start_exporter(nn.Linear(2, 2), 0, watch="all", targets=tmp_path / "file") as exporter:
            page = requests.get(f"http://127.0.0.1:{exporter.port}/metrics", timeout=30).text
        assert re.search(r'act_errors_total\{.*stage="server"\} 1.0', page)
        assert "not listed in" in caplog.text

    def test_closing_unlists(self, tmp_path, monkeypatch):
        monkeypatch.setenv("ACT_TARGETS", str(tmp_path))
        with start_exporter(nn.Linear(2, 2), 0, watch="all", run="r") as exporter:
            (group,) = listed(tmp_path)
            assert group["targets"] == [f"127.0.0.1:{exporter.port}"]
        assert listed(tmp_path) == []
