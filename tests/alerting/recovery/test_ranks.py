"""Several ranks that train one model: they save, stop, fail and go back together."""

from __future__ import annotations

import pytest

from alerting.exit_codes import RESTART
from deploy.demo.servers import wait_for
from tests.alerting.recovery.ranked import SECONDS, last_of, run, start, steps_of
from tests.alerting.recovery.trainer import open_request, read_json

TOTAL = 22
KINDS = ("ddp", "fsdp")


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """What two ranks do when nothing happens, by kind and rank."""
    found = {}
    for kind in KINDS:
        folder = tmp_path_factory.mktemp(kind)
        job = run(folder / "run", folder, 2, kind, total=TOTAL)
        assert job.codes == [0, 0], job.logs
        found[kind] = [last_of(folder, rank) for rank in range(2)]
    return found


def answers(folder):
    return [read_json(path) for path in sorted((folder / "control" / "answers").glob("*.json"))]


class TestResume:
    @pytest.mark.parametrize("kind", KINDS)
    def test_killed_at_once_and_started_again_it_is_bitwise_the_uninterrupted_run(
        self, tmp_path, reference, kind
    ):
        folder = tmp_path / "run"
        job = start(folder, tmp_path, 2, kind, total=TOTAL)
        wait_for(
            lambda: (
                len(last_of(tmp_path, 0)) >= 13 or any(p.poll() is not None for p in job.processes)
            ),
            "step 13",
            timeout=SECONDS,
            interval=0.001,
        )
        for process in job.processes:
            process.kill()
        job.wait()
        again = run(folder, tmp_path, 2, kind, total=TOTAL)
        assert again.codes == [0, 0], again.logs
        manifest = read_json(folder / "checkpoints" / f"step-{TOTAL:08d}-g0" / "manifest.json")
        assert manifest["world_size"] == 2
        assert {"rank-00000.pt", "rank-00001.pt", ".metadata"} < manifest["files"].keys()
        for rank in range(2):
            # Each step, each time that it was taken, was the same.
            for record in steps_of(tmp_path, rank):
                assert record == reference[kind][rank][record[0]]

    @pytest.mark.parametrize(
        ("before", "after"),
        [
            (("ddp", 2), ("ddp", 4)),
            (("fsdp", 4), ("fsdp", 2)),
            (("fsdp", 4), ("ddp", 1)),
            (("ddp", 2), ("fsdp", 2)),
        ],
    )
    def test_other_ranks_go_on_from_the_same_weights_and_moments(self, tmp_path, before, after):
        folder = tmp_path / "run"
        first = run(folder, tmp_path / "first", before[1], before[0], total=10)
        assert first.codes == [0] * before[1], first.logs
        second = run(folder, tmp_path / "second", after[1], after[0], total=14)
        assert second.codes == [0] * after[1], second.logs
        stood = last_of(tmp_path / "first", 0)[10][3]
        draws = set()
        for rank in range(after[1]):
            records = steps_of(tmp_path / "second", rank)
            assert [record[0] for record in records] == [11, 12, 13, 14]
            assert records[0][-1] == stood
            draws.add(records[0][5])
        # No two ranks draw alike.
        assert len(draws) == after[1]


class TestRecovery:
    @pytest.mark.parametrize(("kind", "every", "back_to"), [("ddp", 1, 10), ("fsdp", 4, 9)])
    def test_all_ranks_go_back_together_for_what_one_has_seen(
        self, tmp_path, reference, kind, every, back_to
    ):
        folder = tmp_path / "run"
        job = run(
            folder,
            tmp_path,
            2,
            kind,
            total=TOTAL,
            settings={"check_every": every},
            troubles=[
                {"rank": 1, "step": 13, "what": "bad", "once": True},
                {"rank": 0, "step": 15, "what": "ask", "action": "recover", "once": True},
            ],
        )
        assert job.codes == [0, 0], job.logs
        [told] = answers(folder)
        assert told["result"] == "done"
        assert (told["onset"], told["resumed_from"]) == (13, f"step-{back_to:08d}-g0")
        for rank in range(2):
            numbers = [record[0] for record in steps_of(tmp_path, rank)]
            at = told["step"]
            assert numbers == [*range(1, at + 1), *range(back_to + 1, TOTAL + 1)]
            assert last_of(tmp_path, rank) == reference[kind][rank]

    def test_refused_by_all_where_no_rank_has_seen_a_bad_step(self, tmp_path, reference):
        folder = tmp_path / "run"
        asks = {"rank": 0, "step": 7, "what": "ask", "action": "recover"}
        job = run(folder, tmp_path, 2, total=TOTAL, troubles=[asks])
        assert job.codes == [0, 0], job.logs
        assert [told["result"] for told in answers(folder)] == ["refused"]
        for rank in range(2):
            assert len(steps_of(tmp_path, rank)) == TOTAL
            assert last_of(tmp_path, rank) == reference["ddp"][rank]

    def test_a_request_at_the_very_end_is_answered(self, tmp_path):
        folder = tmp_path / "run"
        asks = {"rank": 0, "step": TOTAL, "what": "ask", "action": "checkpoint"}
        job = run(folder, tmp_path, 2, total=TOTAL, troubles=[asks])
        assert job.codes == [0, 0], job.logs
        assert [told["result"] for told in answers(folder)] == ["done"]

    def test_ended_for_a_restart_the_next_processes_go_back(self, tmp_path, reference):
        folder = tmp_path / "run"
        plan = {
            "total": TOTAL,
            "settings": {"recover_by": "restart"},
            "troubles": [
                {"rank": 0, "step": 13, "what": "bad", "once": True},
                {"rank": 0, "step": 14, "what": "ask", "action": "recover", "once": True},
            ],
        }
        job = run(folder, tmp_path, 2, **plan)
        assert job.codes == [RESTART, RESTART], job.logs
        assert answers(folder) == []
        job = run(folder, tmp_path, 2, **plan)
        assert job.codes == [0, 0], job.logs
        assert [told["result"] for told in answers(folder)] == ["done"]
        for rank in range(2):
            assert last_of(tmp_path, rank) == reference["ddp"][rank]


class TestStop:
    @pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1"])
    def test_a_signal_to_one_rank_saves_and_ends_all(self, tmp_path, reference, name):
        folder = tmp_path / "run"
        signals = {"rank": 1, "step": 8, "what": "signal", "name": name}
        job = run(folder, tmp_path, 2, total=TOTAL, troubles=[signals])
        assert job.codes == [RESTART, RESTART], job.logs
        assert read_json(folder / "control" / "status.json")["state"] == "stopped"
        stood = [steps_of(tmp_path, rank)[-1][0] for rank in range(2)]
        assert stood[0] == stood[1] < 12
        job = run(folder, tmp_path, 2, total=TOTAL)
        assert job.codes == [0, 0], job.logs
        for rank in range(2):
            # Not one step was lost or taken twice.
            assert [r[0] for r in steps_of(tmp_path, rank)] == list(range(1, TOTAL + 1))
            assert last_of(tmp_path, rank) == reference["ddp"][rank]


class TestFailure:
    def test_what_one_rank_cannot_save_none_saves_and_training_goes_on(self, tmp_path, reference):
        folder = tmp_path / "run"
        troubles = [
            {"rank": 1, "step": 4, "what": "note", "broken": True},
            {"rank": 1, "step": 8, "what": "note", "broken": False},
        ]
        job = run(folder, tmp_path, 2, total=TOTAL, troubles=troubles)
        assert job.codes == [0, 0], job.logs
        assert "rank 1: ValueError: the note is lost" in job.logs[0]
        names = sorted(path.name for path in (folder / "checkpoints").glob("step-*"))
        assert "step-00000005-g0" not in names
        assert f"step-{TOTAL:08d}-g0" in names
        assert not list((folder / "checkpoints").glob(".*"))
        for rank in range(2):
            assert last_of(tmp_path, rank) == reference["ddp"][rank]

    def test_an_error_of_the_guards_own_ends_all_ranks_at_one_step(self, tmp_path):
        troubles = [{"rank": 1, "step": 8, "what": "detector"}]
        job = run(tmp_path / "run", tmp_path, 2, total=TOTAL, troubles=troubles)
        assert job.codes == [1, 1], job.logs
        assert "rank 1: ValueError: the detector is at its wits' end" in job.logs[0]
        assert len({steps_of(tmp_path, rank)[-1][0] for rank in range(2)}) == 1

    @pytest.mark.parametrize("what", ["kill", "raise"])
    def test_one_of_four_is_lost_and_none_waits_for_it(self, tmp_path, what):
        folder = tmp_path / "run"
        trouble = {"rank": 2, "step": 8, "what": "raise"}
        if what == "kill":
            trouble |= {"what": "signal", "name": "SIGKILL"}
        job = run(folder, tmp_path, 4, total=TOTAL, troubles=[trouble])
        assert job.codes[2] == (1 if what == "raise" else -9)
        # Ended by themselves with an error, not by the test after its patience.
        assert [code for rank, code in enumerate(job.codes) if rank != 2] == [1, 1, 1], job.logs
        again = run(folder, tmp_path, 4, total=TOTAL)
        assert again.codes == [0] * 4, again.logs

    def test_one_that_does_not_fit_the_checkpoint_ends_all(self, tmp_path):
        folder = tmp_path / "run"
        assert run(folder, tmp_path, 2, total=5).codes == [0, 0]
        (folder / "checkpoints" / "step-00000005-g0" / "rank-00001.pt").write_bytes(b"altered")
        assert run(folder, tmp_path, 2, total=10).codes == [0, 0]
        assert read_json(folder / "checkpoints" / "step-00000005-g0" / "health.json")["health"] == (
            "corrupt"
        )
        # Whoever took the run meanwhile is left alone.
        assert open_request(folder, "checkpoint")
