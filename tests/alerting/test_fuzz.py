"""Whatever is sent to the receiver: no 5xx, sentences as answers, nothing repeated, bounded memory.

A real receiver process, so that its log and its memory are looked at too. The inputs are the same
every time; a search that may end differently is for a workbench, not for CI.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from schemathesis.generation import GenerationMode
from schemathesis.schemas import BaseSchema

from deploy.demo.servers import wait_for
from tests.alerting.bots import FeishuBot
from tests.alerting.deliveries import alert, payload, register, text
from tests.alerting.test_messages import receiving, tell
from tests.alerting.test_receiver import TIMEOUT, TOKEN, Receiver

MARK = "zq7-input-zq7"
"""In what is sent, and in nothing else."""
PATHS = ("/alerts", "/messages")
MIB = 1 << 20

bounded = settings(
    max_examples=150,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)


@pytest.fixture(scope="module")
def receiver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Receiver]:
    folder = tmp_path_factory.mktemp("fuzz")
    register(folder / "runs")
    with FeishuBot().serving() as bot, receiving(folder, feishu=bot) as started:
        with requests.Session() as session:
            session.headers["Authorization"] = f"Bearer {TOKEN}"
            started.session = session  # type: ignore[attr-defined]
            yield started
        # It has lived through all of it.
        assert started.server.returncode() is None
        assert requests.get(f"{started.address}/healthz", timeout=TIMEOUT).ok
        log = started.server.log.read_text()
        assert "Traceback" not in log
        assert TOKEN not in log


@pytest.fixture(scope="module")
def api(receiver: Receiver) -> BaseSchema:
    return schemathesis.openapi.from_url(f"{receiver.address}/openapi.json")


def send(receiver: Receiver, path: str, body: str | bytes, **options: Any) -> requests.Response:
    """Over one connection: a new one each would use up the ports before the patience."""
    session: requests.Session = receiver.session  # type: ignore[attr-defined]
    data = body.encode("utf-8", "surrogatepass") if isinstance(body, str) else body
    return session.post(receiver.address + path, data=data, timeout=TIMEOUT, **options)


def check(answer: requests.Response, codes: tuple[int, ...] = (202, 400, 413, 422)) -> None:
    """Held by every answer: a known status, and an id or one sentence that repeats nothing."""
    assert answer.status_code in codes, answer.text
    content = answer.json()
    if answer.status_code == 202:
        ((name, identifier),) = content.items()
        assert name in ("delivery", "message")
        assert isinstance(identifier, int)
        return
    assert list(content) == ["detail"]
    sentence = content["detail"]
    assert re.fullmatch(r"[A-Z`][^\n]{5,400}[.)]\.?", sentence), sentence
    assert MARK not in answer.text
    assert TOKEN not in answer.text


class TestSchema:
    """schemathesis: what the OpenAPI schema says is what is done."""

    @pytest.mark.parametrize("mode", list(GenerationMode))
    @pytest.mark.parametrize("path", PATHS)
    def test_notifications(self, api: BaseSchema, path: str, mode: GenerationMode) -> None:
        @bounded
        @given(case=api[path]["POST"].as_strategy(generation_mode=mode))
        def each(case: schemathesis.Case) -> None:
            answer = case.call(headers={"Authorization": f"Bearer {TOKEN}"})
            assert answer.status_code < 500
            # 1.0 is an integer to JSON schema and none to Alertmanager.
            excluded = ["positive_data_acceptance"]
            if answer.status_code == 413:
                # A refusal too, which schemathesis does not count among them.
                excluded.append("negative_data_rejection")
            checks = [schemathesis.checks.CHECKS.get_one(name) for name in excluded]
            case.validate_response(answer, excluded_checks=checks)

        each()

    @pytest.mark.parametrize("path", ["/healthz", "/readyz", "/metrics"])
    def test_its_own_state(self, api: BaseSchema, path: str) -> None:
        @bounded
        @given(case=api[path]["GET"].as_strategy())
        def each(case: schemathesis.Case) -> None:
            case.call_and_validate()

        each()


JUNK = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=20).map(lambda text: MARK + text)
    | st.sampled_from(["firing", "resolved", "4", "gpt", "recover", "2026-01-05T10:00:00Z"]),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(max_size=8).map(lambda key: MARK + key), inner, max_size=4)
    ),
    max_leaves=8,
)
LABELS = st.dictionaries(
    st.sampled_from(["alertname", "run", "action", "layer", f"{MARK}\nERROR forged"]),
    st.sampled_from(["ActRunaway", "gpt", "recover", "checkpoint", "x" * 5000, "\x00", "层"])
    | JUNK,
    max_size=5,
)
ALERT = st.fixed_dictionaries(
    {},
    optional={
        "status": st.sampled_from(["firing", "resolved"]) | JUNK,
        "labels": LABELS | JUNK,
        "annotations": LABELS | JUNK,
        "startsAt": st.sampled_from(["0001-01-01T00:00:00Z", "9999-12-31T23:59:59+14:00"]) | JUNK,
        "endsAt": JUNK,
        "generatorURL": JUNK,
        "fingerprint": JUNK,
    },
)
FIELDS = st.fixed_dictionaries(
    {},
    optional=dict.fromkeys(
        ("version", "groupKey", "status", "receiver", "truncatedAlerts", "externalURL"), JUNK
    )
    | dict.fromkeys(("groupLabels", "commonLabels", "commonAnnotations"), LABELS | JUNK),
)


class TestPayloads:
    @pytest.mark.parametrize("path", PATHS)
    def test_almost_what_alertmanager_sends(self, receiver: Receiver, path: str) -> None:
        @bounded
        @example(alerts=[{"labels": {f"{MARK}\nERROR forged": 1}, "status": "firing"}], fields={})
        @example(alerts=[], fields={MARK: MARK, "version": MARK})
        @given(alerts=st.lists(ALERT, max_size=4), fields=FIELDS)
        def each(alerts: list[Any], fields: dict[str, Any]) -> None:
            valid = [alert(run="nobody", layer=str(number)) for number in range(2)]
            mixed = [one | two for one, two in zip(valid, alerts, strict=False)] + alerts[2:]
            check(send(receiver, path, json.dumps(payload(alert(), **fields, alerts=mixed))))

        each()
        assert "\nERROR forged" not in receiver.server.log.read_text()

    @pytest.mark.parametrize("path", PATHS)
    def test_any_json(self, receiver: Receiver, path: str) -> None:
        @bounded
        @given(content=JUNK)
        def each(content: Any) -> None:
            check(send(receiver, path, json.dumps(content)), (400, 422))

        each()


class TestBytes:
    @pytest.mark.parametrize("path", PATHS)
    def test_any_bytes(self, receiver: Receiver, path: str) -> None:
        @bounded
        @given(body=st.binary(max_size=200))
        def each(body: bytes) -> None:
            check(send(receiver, path, body), (400, 422))

        each()

    @pytest.mark.parametrize("path", PATHS)
    def test_a_notification_with_bytes_lost_changed_or_repeated(
        self, receiver: Receiver, path: str
    ) -> None:
        whole = text(alert(run="nobody", note=f"{MARK} 层 \u0000")).encode()

        @bounded
        @given(
            begin=st.integers(0, len(whole)),
            length=st.integers(0, 60),
            instead=st.binary(max_size=6) | st.sampled_from([b"\\ud800", b"\xff", b"1e999", b"["]),
        )
        def each(begin: int, length: int, instead: bytes) -> None:
            check(send(receiver, path, whole[:begin] + instead + whole[begin + length :]))

        each()

    @pytest.mark.parametrize(
        "body",
        [
            pytest.param(b"[" * 500_000, id="depth"),
            pytest.param(b'{"a":' * 100_000, id="depth-of-objects"),
            pytest.param(b'{"truncatedAlerts": ' + b"9" * 900_000 + b"}", id="digits"),
            pytest.param(text(alert(), truncatedAlerts=10**4000), id="a-count-of-4000-digits"),
            pytest.param(text(*[alert()] * 4000)[:MIB], id="cut-at-the-limit"),
            pytest.param(b'{"alerts": [' + b"{}," * 300_000 + b"{}]}", id="empty-alerts"),
            pytest.param(json.dumps({f"{n}": n for n in range(80_000)}), id="keys"),
            pytest.param('{"version": "\ud800"}', id="half-a-surrogate-pair"),
            pytest.param("﻿" + text(alert(run="nobody")), id="byte-order-mark"),
            pytest.param(text(alert(run="nobody")).encode("utf-16"), id="utf-16"),
        ],
    )
    @pytest.mark.parametrize("path", PATHS)
    def test_known_troublemakers(self, receiver: Receiver, path: str, body: str | bytes) -> None:
        check(send(receiver, path, body), (400, 413, 422))

    @pytest.mark.parametrize("path", PATHS)
    def test_any_token_but_the_right_one(self, receiver: Receiver, path: str) -> None:
        latin = st.characters(min_codepoint=0x20, max_codepoint=0xFF, exclude_characters="\x7f")

        @bounded
        @given(token=st.text(latin, max_size=60), scheme=st.sampled_from(["Bearer ", "Basic ", ""]))
        def each(token: str, scheme: str) -> None:
            # Around a header's value spaces count for nothing.
            header = f"{scheme}{token}{MARK}".strip().encode("latin-1")
            answer = send(receiver, path, text(alert()), headers={"Authorization": header})
            check(answer, (401,))

        each()


class TestMemory:
    def test_hundreds_of_large_bodies_leave_nothing_behind(self, tmp_path: Path) -> None:
        """Half a gigabyte of them, eight at once; each may be 1 MiB, and most are refused."""
        storm = text(*(alert(run="nobody", layer=f"blocks.{n}" + "x" * 200) for n in range(1700)))
        assert 0.8 * MIB < len(storm) < MIB
        wrong = b'{"alerts": [' + b"{}," * 340_000 + b"{}]}"
        bodies = [storm.encode(), wrong, b"x" * (5 * MIB), storm.encode()[:-1]]

        def chunked(body: bytes) -> Iterator[bytes]:
            for begin in range(0, len(body), 100_000):
                yield body[begin : begin + 100_000]

        with FeishuBot().serving() as bot, receiving(tmp_path, feishu=bot) as receiver:
            assert receiver.server.process is not None
            status = Path(f"/proc/{receiver.server.process.pid}/status")

            def mib(field: str) -> float:
                return int(re.findall(rf"{field}:\s+(\d+) kB", status.read_text())[0]) / 1024

            def one(number: int) -> int:
                body, path = bodies[number % len(bodies)], PATHS[number // 4 % 2]
                headers = {"Authorization": f"Bearer {TOKEN}"}
                # A refusal may come, and the connection be closed, before all of it is sent.
                with contextlib.suppress(requests.ConnectionError):
                    data = chunked(body) if number // 8 % 2 else body
                    return requests.post(
                        receiver.address + path, data=data, headers=headers, timeout=TIMEOUT
                    ).status_code
                return 0

            def round_of(count: int) -> set[int]:
                with ThreadPoolExecutor(8) as pool:
                    return set(pool.map(one, range(count)))

            assert round_of(80) - {0} == {202, 400, 413, 422}
            warm = mib("VmRSS")
            round_of(320)
            # What the worker still has to read it reads one by one.
            wait_for(
                lambda: not receiver.rows("SELECT 1 FROM deliveries WHERE handled_at IS NULL"),
                "all that was recorded",
            )
            # Each body costs a few times its size while it is read, and a leak of them 100 MiB.
            assert mib("VmRSS") - warm < 60
            assert mib("VmHWM") - warm < 150
            tell(receiver, "afterwards")
