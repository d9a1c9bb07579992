"""`act-exporter watch` as people run it: against real exporters, in pipes and in a terminal."""

from __future__ import annotations

import contextlib
import fcntl
import io
import os
import pty
import re
import select
import signal
import socket
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from rich.console import Console
from torch import nn

from act_exporter.exceptions import SettingError
from act_exporter.exporter import Exporter
from act_exporter.torch_exporter import TorchExporter
from act_exporter.watch.screen import show
from deploy.demo.servers import wait_for
from tests.act_exporter.models import gpt, train
from tests.act_exporter.watched import FAULTY, QUICK, address, answering, exporting

COMMAND = Path(sys.executable).with_name("act-exporter")
SECONDS = 60

# The least that is an exporter's page.
STEP = b'act_step{run="gpt",rank="0"} 7\n'

# What a terminal takes for something other than text.
_CONTROLS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [COMMAND, "watch", *arguments],
        env={"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", **environment},
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )


def once(*addresses: str, layers: int = 12) -> tuple[int, str]:
    """The exit code, and what a pipe would get, of one frame made in this process."""
    out = io.StringIO()
    code = show(
        addresses, interval="2", once=True, layers=layers, console=Console(file=out, width=80)
    )
    return code, out.getvalue()


class Terminal:
    """The command in a terminal of its own."""

    def __init__(self, *arguments: str, columns: int = 80, rows: int = 24, **more: str) -> None:
        self.output = ""
        self._here, there = pty.openpty()
        self.resize(columns, rows)
        self.process = subprocess.Popen(
            [COMMAND, "watch", *arguments],
            env={"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "TERM": "xterm-256color", **more},
            stdin=there,
            stdout=there,
            stderr=there,
            start_new_session=True,
        )
        os.close(there)

    def resize(self, columns: int, rows: int) -> None:
        size = struct.pack("HHHH", rows, columns, 0, 0)
        fcntl.ioctl(self._here, termios.TIOCSWINSZ, size)

    @property
    def text(self) -> str:
        """All that was drawn so far, as text."""
        return _CONTROLS.sub("", self.output)

    def frames(self) -> list[list[str]]:
        """What was drawn from one return to the upper left corner to the next, by lines."""
        return [_CONTROLS.sub("", f).split("\r\n") for f in self.output.split("\x1b[H")[1:]]

    def read(self) -> None:
        while select.select([self._here], [], [], 0)[0]:
            try:
                part = os.read(self._here, 1 << 16)
            except OSError:  # its end, on Linux
                return
            self.output += part.decode(errors="replace")

    def wait_for(self, shown: Callable[[], object], what: str) -> None:
        def look() -> object:
            self.read()
            return shown()

        try:
            wait_for(look, what, timeout=SECONDS)
        except TimeoutError as error:
            raise AssertionError(f"{error}; it showed {self.text[-3000:]}") from None

    def end(self, number: signal.Signals) -> int:
        """The exit code after a signal."""
        self.process.send_signal(number)
        self.wait_for(lambda: self.process.poll() is not None, "its end")
        self.read()
        return self.process.wait(0)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self._here)


@contextlib.contextmanager
def terminal(*arguments: str, **more: str) -> Iterator[Terminal]:
    opened = Terminal(*arguments, **more)
    try:
        yield opened
    finally:
        opened.close()


def nobody() -> str:
    """An address where nothing listens."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{free.getsockname()[1]}"


@pytest.fixture(scope="module")
def healthy() -> Iterator[Exporter]:
    with exporting() as exporter:
        yield exporter


@pytest.fixture(scope="module")
def faulty() -> Iterator[Exporter]:
    with exporting(fault=1e5) as exporter:
        yield exporter


class TestOnce:
    def test_names_the_layer_that_went_first_and_the_alerts(self, faulty: Exporter) -> None:
        done = run(address(faulty), "--once")
        assert done.returncode == 1, done.stderr
        assert "ANOMALY since step 41" in done.stdout
        assert f"First was {FAULTY} (output), at " in done.stdout
        assert "An activation fault: layers went bad while the gradients were calm." in " ".join(
            done.stdout.split()
        )
        assert re.search(
            r"critical ActRunaway: .+ was bad for 5 sampled steps in a row", done.stdout
        )
        assert f"critical ActLayerAboveBaseline: {FAULTY} output reached " in done.stdout
        (row,) = [
            line for line in done.stdout.splitlines() if line.startswith(f"▲ {FAULTY} output ")
        ]
        assert row.endswith("over 100x")
        assert f"▲ {FAULTY} output was first" in done.stdout

    def test_a_healthy_run_is_well(self, healthy: Exporter) -> None:
        done = run(address(healthy), "--once")
        assert done.returncode == 0, done.stdout + done.stderr
        assert "ALL WELL  Nothing is out of line in 15 tensors." in done.stdout
        assert "no alert's condition holds" in done.stdout
        assert "\x1b" not in done.stdout
        assert done.stderr == ""

    def test_non_finite_values_are_said_as_such(self) -> None:
        with exporting(fault=float("nan")) as exporter:
            code, shown = once(address(exporter))
        assert code == 1
        assert re.search(
            rf"First was {re.escape(FAULTY)} \(output\), with \d+k? elements of NaN or Inf so far",
            shown,
        )
        assert "critical ActLayerNonFinite: " in shown
        assert f"▲ {FAULTY} output" in shown

    def test_before_the_first_sampled_step_it_waits(self) -> None:
        exporter = TorchExporter(
            gpt(), run="gpt", rank=0, watch="sublayers", sample_every=1, thresholds=QUICK
        )
        with exporter:
            exporter.serve("127.0.0.1", 0)
            code, shown = once(address(exporter))
        assert code == 0
        assert "WAITING  No sampled step has ended yet." in shown

    def test_nothing_there(self) -> None:
        where = nobody()
        done = run(where, "--once")
        assert done.returncode == 2
        assert f"{where} cannot be reached: nothing listens there" in " ".join(done.stdout.split())

    def test_a_pipe_gets_one_frame_by_itself_with_names_in_full(self) -> None:
        name = "a_name_of_a_module_that_is_much_longer_than_anybody_would_give_to_one" * 2
        model = nn.Module()
        model.add_module(name, gpt())
        inner = model.get_submodule(name)
        model.forward = inner.forward  # type: ignore[method-assign]
        with exporting(model=model) as exporter:
            code, shown = once(address(exporter), layers=20)
        assert code == 0
        assert f"{name}.blocks.1.mlp.down output" in shown

    def test_guard_and_checkpoints_are_told_where_they_are_on_the_page(
        self, healthy: Exporter
    ) -> None:
        from alerting.recovery.metrics import GuardMetrics, GuardSnapshot

        assert "no guard on these pages" in once(address(healthy))[1]
        guard = GuardMetrics("gpt")
        guard.snapshot = GuardSnapshot(
            last_step=30,
            last_success_at=time.time() - 125,
            rollbacks=1,
            budget_remaining=2,
            failures=4,
            healths={"confirmed": 3, "suspect": 1},
        )
        guard.register(healthy.registry)
        try:
            _, shown = once(address(healthy))
        finally:
            guard.unregister(healthy.registry)
        assert (
            "newest checkpoint at step 30, 2 min old (3 confirmed, 1 suspect); 4 saves failed;"
            " rollbacks: 1 made, 2 left"
        ) in shown

    def test_ascii_terminals_get_ascii(self, faulty: Exporter) -> None:
        done = run(address(faulty), PYTHONIOENCODING="ascii", LANG="C")
        assert done.returncode == 1
        assert done.stdout.isascii()
        assert f"^ {FAULTY} output" in done.stdout
        assert "?" not in done.stdout

    @pytest.mark.parametrize(
        "wrong", ["ftp://node17", "http://", "node17:port", "http://user:secret@node17", "a b", ""]
    )
    def test_what_is_no_address(self, wrong: str) -> None:
        with pytest.raises(SettingError, match="is no exporter's address, such as node17:9460"):
            once(wrong)

    @pytest.mark.parametrize("wrong", ["soon", "0.1s", "-2", "nan", ""])
    def test_what_is_no_interval(self, wrong: str) -> None:
        with pytest.raises(SettingError, match="must be seconds"):
            show(["node17"], interval=wrong, once=True, layers=3, console=Console())

    def test_a_wrong_argument_is_one_sentence_and_exit_code_2(self) -> None:
        done = run("ftp://node17")
        assert done.returncode == 2
        assert done.stderr.startswith("act-exporter: 'ftp://node17' is no exporter's address")
        assert done.stderr.count("\n") == 1
        assert done.stdout == ""


class TestSeveral:
    def test_ranks_have_a_line_each_and_a_layer_stands_once_with_its_worst_rank(
        self, healthy: Exporter
    ) -> None:
        with exporting(fault=1e5, rank=1) as other:
            code, shown = once(address(healthy), address(other))
        assert code == 1
        assert f"First was {FAULTY} (output, rank 1)" in shown
        lines = shown.splitlines()
        head = next(n for n, line in enumerate(lines) if line.startswith("rank "))
        assert [line.split()[0] for line in lines[head + 1 : head + 3]] == ["1", "0"]
        assert lines[head + 1].endswith("bad since 41")
        assert lines[head + 2].endswith("well")
        (row,) = [line for line in lines if line.startswith(f"▲ {FAULTY} output ")]
        assert row.split()[3] == "1"

    def test_one_that_is_away_does_not_hide_the_others(self, healthy: Exporter) -> None:
        where = nobody()
        code, shown = once(address(healthy), where, layers=20)
        assert code == 2
        assert f"NO ANSWER  {where} cannot be reached" in shown
        assert "blocks.1.mlp.down output" in shown

    def test_an_anomaly_is_more_than_an_exporter_that_is_away(self, faulty: Exporter) -> None:
        code, shown = once(address(faulty), where := nobody())
        assert code == 1
        assert where in shown

    def test_runs_are_told_apart(self, healthy: Exporter) -> None:
        with exporting(fault=1e5, run="other") as other:
            _, shown = once(address(healthy), address(other))
        assert "ANOMALY in other since step 41" in shown
        assert "largest values by depth of other" in shown

    def test_an_address_that_is_given_twice_is_asked_once(self) -> None:
        with answering(lambda: (200, STEP)) as served:
            once(served.address, served.address)
        assert served.asked == 1


class TestAnswers:
    @pytest.mark.parametrize(
        ("status", "body", "said"),
        [
            (404, b"", "answers with HTTP status 404 in place of metrics"),
            (500, b"oops", "answers with HTTP status 500 in place of metrics"),
            (200, b"<!DOCTYPE html>\n<p>hello", "answers with no page of metrics"),
            (200, b"\xff\xfe\x00\x01", "answers with no page of metrics"),
            (200, b"", "there is no act_step"),
            (200, b"up 1\n", "there is no act_step"),
            (200, STEP.replace(b"7", b"NaN"), "answers with steps that are no numbers"),
            (200, STEP.replace(b"}", b""), "answers with no page of metrics"),
        ],
    )
    def test_what_is_no_page_is_said_in_a_sentence(
        self, status: int, body: bytes, said: str
    ) -> None:
        with answering(lambda: (status, body)) as served:
            code, shown = once(served.address)
        assert code == 2
        assert f"NO ANSWER  {served.address} " in shown
        assert said in shown

    def test_a_page_of_nothing_but_a_step_is_shown(self) -> None:
        with answering(lambda: (200, STEP)) as served:
            code, shown = once(served.address)
        assert code == 0
        assert "WAITING" in shown

    @pytest.mark.parametrize(
        ("written", "path"),
        [
            ("{}", "/metrics"),
            ("http://{}", "/metrics"),
            ("http://{}/", "/metrics"),
            ("http://{}/metrics", "/metrics"),
            ("http://{}/gpt/metrics/", "/gpt/metrics"),
            ("{}/gpt", "/gpt/metrics"),
        ],
    )
    def test_addresses_may_be_written_short(self, written: str, path: str) -> None:
        with answering(lambda: (200, STEP)) as served:
            code, _ = once(written.format(served.address))
        assert (code, served.paths) == (0, [path])

    def test_proxies_are_for_the_web(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("http_proxy", f"http://{nobody()}")
        with answering(lambda: (200, STEP)) as served:
            assert once(served.address)[0] == 0

    def test_names_are_text_and_nothing_else(self) -> None:
        """Neither a terminal's commands nor rich's markup."""
        model = nn.ModuleDict({"\x1b[2Jgone\x07": gpt(), "[red]loud[/red]": gpt()})
        parts = list(model.values())
        model.forward = lambda x: sum(part(x) for part in parts)  # type: ignore[method-assign]
        with exporting(model=model) as exporter:
            code, shown = once(address(exporter), layers=60)
            with terminal(address(exporter), "--layers=60", rows=70, columns=120) as opened:
                opened.wait_for(lambda: "ALL WELL" in opened.text, "a frame")
        assert code == 0
        assert not any(ord(character) < 32 and character != "\n" for character in shown)
        for told in (shown, opened.text):
            assert "[2Jgone .blocks.0 output" in told
            assert "[red]loud[/red].blocks.0 output" in told
        assert "\x1b[2Jgone" not in opened.output
        assert "\x07" not in opened.output


class TestLive:
    def test_shows_frames_and_leaves_the_terminal_as_it_was(self) -> None:
        model = gpt()
        with (
            exporting(model=model) as exporter,
            terminal(address(exporter), "--interval", "0.5s") as opened,
        ):
            opened.wait_for(lambda: "ALL WELL" in opened.text, "a frame")
            train(model, 3)
            opened.wait_for(lambda: re.search(r"0 +43 +[\d.e]+ ", opened.text), "a step rate")
            assert opened.output.startswith("\x1b[?1049h")
            assert opened.end(signal.SIGINT) == 0
        # The screen of before, and its cursor.
        assert opened.output.rindex("\x1b[?1049l") > opened.output.rindex("ALL WELL")
        assert opened.output.rindex("\x1b[?25h") > opened.output.rindex("\x1b[?25l")
        assert "Traceback" not in opened.output
        assert "Aborted" not in opened.output

    def test_other_ends_leave_it_so_too(self, healthy: Exporter) -> None:
        with terminal(address(healthy)) as opened:
            opened.wait_for(lambda: "ALL WELL" in opened.text, "a frame")
            assert opened.end(signal.SIGTERM) == 128 + signal.SIGTERM
        assert "\x1b[?1049l" in opened.output
        assert "Traceback" not in opened.output

    @pytest.mark.parametrize(("columns", "rows"), [(80, 24), (160, 50), (40, 12)])
    def test_no_line_is_wider_than_the_terminal(
        self, faulty: Exporter, columns: int, rows: int
    ) -> None:
        with terminal(address(faulty), columns=columns, rows=rows) as opened:
            opened.wait_for(lambda: "ANOMALY" in opened.text, "a frame")
            drawn = len(opened.frames())
            opened.wait_for(lambda: len(opened.frames()) > drawn, "the next frame")
        whole = opened.frames()[-2]
        assert len(whole) <= rows
        assert max(map(len, whole)) <= columns
        assert FAULTY in " ".join(whole)

    def test_a_terminal_of_another_size_is_drawn_on_anew(self, faulty: Exporter) -> None:
        with terminal(address(faulty), "--interval", "30") as opened:
            opened.wait_for(lambda: "ANOMALY" in opened.text, "a frame")
            assert "since watching" not in opened.text
            opened.resize(150, 40)
            opened.wait_for(lambda: "since watching" in opened.text, "the wide table")

    def test_an_exporter_that_goes_away_is_waited_for(self) -> None:
        with exporting() as exporter:
            where, port = address(exporter), exporter.port
            assert port is not None
            with terminal(where, "--interval", "0.5") as opened:

                def said() -> str:
                    return " ".join(opened.text.split())

                opened.wait_for(lambda: "ALL WELL" in opened.text, "a frame")
                server = exporter._server
                assert server is not None
                server.close()
                away = f"{where} cannot be reached: nothing listens there, since "
                opened.wait_for(lambda: away in said(), "that it is away")
                assert re.search(rf"{re.escape(away)}\d\d:\d\d:\d\d UTC", said())
                assert "What it said last is shown." in said()
                before = opened.text.rindex("NO ANSWER")
                exporter.serve("127.0.0.1", port)
                opened.wait_for(lambda: opened.text.rfind("ALL WELL") > before, "that it is back")

    def test_an_exporter_that_hangs_is_said_to(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as silent:
            where = f"127.0.0.1:{silent.getsockname()[1]}"
            with terminal(where, "--interval", "0.5") as opened:
                opened.wait_for(lambda: "NO ANSWER" in opened.text, "that it is away")
                assert f"{where} has not answered within 0.45 s" in " ".join(opened.text.split())
                assert opened.end(signal.SIGINT) == 0

    def test_no_color_is_heeded(self, faulty: Exporter) -> None:
        with terminal(address(faulty), NO_COLOR="1") as opened:
            opened.wait_for(lambda: "ANOMALY" in opened.text, "a frame")
        assert not re.search(r"\x1b\[(?:[0-9]+;)*3[0-7]m", opened.output)
        with terminal(address(faulty)) as opened:
            opened.wait_for(lambda: "ANOMALY" in opened.text, "a frame")
        assert re.search(r"\x1b\[(?:[0-9]+;)*31m", opened.output)
