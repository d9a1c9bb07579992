"""The shipped alertmanager.yml: its routes by amtool, and its messages by a real Alertmanager."""

from __future__ import annotations

import contextlib
import email.message
import functools
import json
import re
import subprocess
import threading
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml

from deploy.demo.servers import REPOSITORY, Server, binary, free_port, running, wait_for
from tests.alerting.mailbox import MAIL_SECRET, Mailbox

CONFIG = REPOSITORY / "alerting" / "alertmanager.yml"
PAIR = REPOSITORY / "alerting" / "alertmanager-pair.yml"
RULES = sorted((REPOSITORY / "prometheus" / "rules").glob("*.yml"))
CASES = sorted((REPOSITORY / "tests" / "prometheus").glob("*.yml"))

TRAINER_AND_PEOPLE = "trainer,people"
RECEIVERS = {
    "ActLayerAboveBaseline": TRAINER_AND_PEOPLE,
    "ActLayerNonFinite": TRAINER_AND_PEOPLE,
    "ActRunaway": TRAINER_AND_PEOPLE,
    "ActGradientRunaway": TRAINER_AND_PEOPLE,
    "ActLayerAboveWindow": "dashboard",
    "ActLayerAboveWindowSustained": "people",
    "ActExporterDown": "people",
    "ActTrainerStalled": "people",
    "ActLayerHeadroomLow": TRAINER_AND_PEOPLE,
    "ActLossNonFinite": TRAINER_AND_PEOPLE,
    "ActLayerDrift": "people",
    "ActLogitsDrifting": "people",
    "ActLayerDepthSpike": "people",
    "ActLayerHeadroomEnding": "people",
    "ActLayerDead": "people",
    "ActLayerSaturated": "people",
    "ActAttentionLogitsGrowing": "people",
    "ActRankSpread": "people",
    "ActLossShifted": "people",
    "ActLossSpike": "people",
    "ActGradientNonFinite": "people",
    "ActGradientExplosion": "people",
    "ActGradientVanishing": "people",
    "ActUpdateSpike": "people",
    "ActUpdatesLost": "people",
    "ActDiagnosis": "people",
    "ActExporterAbsent": "people",
    "ActNodeGone": "people",
    "ActHooksSilent": "people",
    "ActExporterErrors": "people",
    "ActOverheadHigh": "people",
    "ActSeriesDropped": "people",
    "ActJournalDropping": "people",
    "ActThresholdsDiffer": "people",
    "ActMemoryNearEnd": "people",
    "ActCheckpointStale": "people",
    "ActCheckpointFailing": "people",
    "ActRollbackBudgetSpent": "people",
    "ActReceiverDown": "people",
    "ActNotificationsFailing": "people",
    "ActMessagesFailing": "people",
    # The receiver tells people when it stays away; itself it is never for people.
    "ActWatchdog": "watchdog",
}

CHAT_SECRET = "chat-secret"
TOKEN = "receiver-token"


def amtool(*arguments: str | Path) -> str:
    done = subprocess.run(
        [binary("amtool"), *map(str, arguments)], capture_output=True, text=True, timeout=60
    )
    output = done.stdout + done.stderr
    assert done.returncode == 0, output
    return output


@functools.cache  # the cases are a second's reading, and a storm has hundreds of alerts
def seen_firing(alertname: str) -> dict[str, Any]:
    """The labels and annotations with which promtool's cases see an alert come out of the rules."""
    for path in CASES:
        for test in yaml.safe_load(path.read_text())["tests"]:
            for case in test["alert_rule_test"]:
                if case["alertname"] == alertname and case["exp_alerts"]:
                    first: dict[str, Any] = case["exp_alerts"][0]
                    return first
    raise LookupError(f"no promtool case in which {alertname} fires")


def shipped_routes(config: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Our one route of the configuration, and the trainer's below it."""
    (parent,) = config["route"]["routes"]
    (trainer,) = (route for route in parent["routes"] if route["receiver"] == "trainer")
    return parent, trainer


def labels_of(alertname: str) -> dict[str, str]:
    return {"alertname": alertname, **seen_firing(alertname)["exp_labels"]}


def expect_route(labels: dict[str, str], receivers: str, config: Path = CONFIG) -> None:
    pairs = [f"{name}={value}" for name, value in labels.items()]
    amtool(
        "config",
        "routes",
        "test",
        f"--config.file={config}",
        f"--verify.receivers={receivers}",
        *pairs,
    )


def uncommented(config: Path) -> str:
    """The configuration with people told by the receiver too, as its comment says."""
    lines = config.read_text().splitlines()
    begin = lines.index("    # webhook_configs:")
    for number in range(begin, len(lines)):
        if not lines[number].startswith("    # "):
            break
        lines[number] = f"    {lines[number][6:]}"
    return "\n".join(lines)


class TestRoutes:
    config = yaml.safe_load(CONFIG.read_text())
    parent, trainer = shipped_routes(config)

    def test_configuration_is_valid(self) -> None:
        assert "SUCCESS" in amtool("check-config", CONFIG)

    def test_every_alert_of_the_rules_has_its_receivers_here(self) -> None:
        names = {
            rule["alert"]
            for path in RULES
            for group in yaml.safe_load(path.read_text())["groups"]
            for rule in group["rules"]
            if "alert" in rule
        }
        assert set(RECEIVERS) == names

    @pytest.mark.parametrize(("alertname", "receivers"), RECEIVERS.items())
    def test_alert_reaches(self, alertname: str, receivers: str) -> None:
        expect_route(labels_of(alertname), receivers)

    def test_a_request_without_a_run_reaches_people_only(self) -> None:
        labels = {**labels_of("ActRunaway"), "run": ""}
        expect_route(labels, "people")
        del labels["run"]
        expect_route(labels, "people")

    def test_an_alert_that_nobody_thought_of_reaches_people(self) -> None:
        expect_route({"alertname": "DiskFull", "instance": "a:9100"}, "people")
        expect_route({"alertname": "ActSomethingNew", "severity": "warning"}, "people")

    @pytest.mark.parametrize(
        ("severity", "receivers"), [("critical", TRAINER_AND_PEOPLE), ("info", "trainer,dashboard")]
    )
    def test_a_drill_takes_the_way_of_a_recovery(self, severity: str, receivers: str) -> None:
        labels = {"alertname": "ActDrill", "run": "gpt", "drill": "1-a"}
        expect_route(labels | {"action": "recover", "severity": severity}, receivers)

    def test_an_unknown_action_reaches_people_only(self) -> None:
        expect_route({**labels_of("ActRunaway"), "action": "recover-all"}, "people")

    def test_times_for_people_and_for_the_trainer(self) -> None:
        times = ("group_wait", "group_interval", "repeat_interval")
        assert [self.parent[time] for time in times] == ["30s", "5m", "60m"]
        assert self.parent["group_by"] == ["run"]
        assert [self.trainer[time] for time in times] == ["0s", "10s", "5m"]
        assert self.trainer["group_by"] == ["run", "action"]

    def test_routes_for_people_take_times_and_grouping_from_the_one_parent(self) -> None:
        """So they come along where only that route is copied into another configuration."""
        for child in self.parent["routes"]:
            if child["receiver"] not in ("trainer", "watchdog"):
                assert child.keys() - {"group_by"} <= {"receiver", "matchers"}
                assert "group_by" not in child or child["matchers"] == ['alertname="ActDrill"']

    def test_the_watchdog_is_sent_well_within_what_the_receiver_waits_for(self) -> None:
        """Sent when a group is looked at and the last is older than the repeat interval."""
        (route,) = (r for r in self.parent["routes"] if r["receiver"] == "watchdog")
        interval, repeat = (int(route[t][:-1]) for t in ("group_interval", "repeat_interval"))
        sent_every = interval * (repeat // interval + 1)
        receiver = yaml.safe_load((REPOSITORY / "alerting" / "receiver.yml").read_text())
        assert sent_every == 60
        assert receiver["watchdog_seconds"] >= 3 * sent_every

    def test_alerts_are_silenced_only_where_both_have_what_is_compared(self) -> None:
        """Labels that are missing on both sides count as equal."""
        for rule in self.config["inhibit_rules"]:
            # Where a layer is named, the rules name run and tensor with it.
            present = f'{"layer" if "layer" in rule["equal"] else "run"}=~".+"'
            assert "run" in rule["equal"]
            assert present in rule["source_matchers"]
            assert present in rule["target_matchers"]

    def test_only_critical_alerts_silence_and_no_request_is_silenced(self) -> None:
        def named(matchers: list[str]) -> list[dict[str, str]]:
            (names,) = (m for m in matchers if m.startswith("alertname"))
            return [labels_of(name) for name in names.split('"')[1].split("|")]

        for rule in self.config["inhibit_rules"]:
            for source in named(rule["source_matchers"]):
                assert source["severity"] == "critical"
                assert set(rule["equal"]) <= set(source)
            for target in named(rule["target_matchers"]):
                assert target["severity"] != "critical"
                assert "action" not in target
                assert set(rule["equal"]) <= set(target)

    def test_the_token_is_not_the_file_that_the_receiver_reads(self) -> None:
        """Either is open to its reader alone, and the two readers are different users."""
        receiver = yaml.safe_load((REPOSITORY / "alerting" / "receiver.yml").read_text())
        (trainer,) = (r for r in self.config["receivers"] if r["name"] == "trainer")
        (webhook,) = trainer["webhook_configs"]
        ours = webhook["http_config"]["authorization"]["credentials_file"]
        assert ours != receiver["token_file"]
        for name in ("alertmanager.yml", "receiver.yml"):
            text = (REPOSITORY / "alerting" / name).read_text()
            assert {ours, receiver["token_file"]} <= set(re.findall(r"/etc/act/[\w-]+", text))

    def test_no_secret_is_in_the_file(self) -> None:
        def keys(node: Any) -> Iterator[str]:
            if isinstance(node, dict):
                for key, value in node.items():
                    yield key
                    yield from keys(value)
            elif isinstance(node, list):
                for value in node:
                    yield from keys(value)

        secrets = {"api_url", "slack_api_url", "smtp_auth_password", "auth_password"}
        secrets |= {"credentials", "bearer_token", "password", "smtp_auth_secret"}
        assert secrets.isdisjoint(keys(self.config))


class TestPair:
    """alertmanager-pair.yml is the same file but for its head and the second receiver."""

    text = PAIR.read_text()

    def test_configuration_is_valid(self) -> None:
        assert "SUCCESS" in amtool("check-config", PAIR)

    def test_routes_people_and_their_reasons_are_the_same_line_by_line(self) -> None:
        def routes(text: str) -> str:
            return text[text.index("# To take it into") : text.index("    # Feishu, DingTalk")]

        assert routes(self.text) == routes(CONFIG.read_text())

    def test_each_webhook_is_there_once_a_receiver_and_differs_in_nothing_else(self) -> None:
        ours, shipped = (yaml.safe_load(path.read_text()) for path in (PAIR, CONFIG))
        for receiver in shipped["receivers"]:
            if "webhook_configs" in receiver:
                receiver["webhook_configs"] = [
                    webhook | {"url": f"https://{host}.example.com{urlsplit(webhook['url']).path}"}
                    for webhook in receiver["webhook_configs"]
                    for host in ("receiver-a", "receiver-b")
                ]
        assert ours == shipped

    def test_both_receivers_tell_people_where_that_part_is_uncommented(
        self, tmp_path: Path
    ) -> None:
        path = tmp_path / "pair.yml"
        path.write_text(uncommented(PAIR))
        assert "SUCCESS" in amtool("check-config", path)
        ours, shipped = (
            yaml.safe_load(uncommented(config))["receivers"][0] for config in (PAIR, CONFIG)
        )
        (webhook,) = shipped["webhook_configs"]
        assert ours["webhook_configs"] == [
            webhook | {"url": f"https://{host}.example.com/messages"}
            for host in ("receiver-a", "receiver-b")
        ]


@pytest.mark.parametrize("path", [CONFIG, PAIR])
def test_later_parsers_read_the_matchers_alike(path: Path) -> None:
    """Since 0.27 values want double quotes, and backslashes in them are escapes."""

    def matchers(node: Any) -> Iterator[str]:
        for key, value in node.items() if isinstance(node, dict) else ():
            if key.endswith("matchers"):
                yield from value
        for value in node.values() if isinstance(node, dict) else node:
            if isinstance(value, dict | list):
                yield from matchers(value)

    found = list(matchers(yaml.safe_load(path.read_text())))
    assert len(found) > 10
    for matcher in found:
        assert re.fullmatch(r'[a-z_]+(=|!=|=~|!~)"[^"\\]*"', matcher), matcher


class TestImported:
    """The one route and the receivers, copied into the configuration of a company."""

    @pytest.fixture
    def imported(self, tmp_path: Path) -> Path:
        shipped = yaml.safe_load(CONFIG.read_text())
        parent, _ = shipped_routes(shipped)
        config = {
            "global": shipped["global"],
            "route": {
                "receiver": "everybody",
                "group_by": ["cluster"],
                "repeat_interval": "4h",
                "routes": [parent, {"receiver": "dba", "matchers": ["team=dba"]}],
            },
            "inhibit_rules": shipped["inhibit_rules"],
            "receivers": [*shipped["receivers"], {"name": "dba"}, {"name": "everybody"}],
        }
        path = tmp_path / "alertmanager.yml"
        path.write_text(yaml.safe_dump(config))
        amtool("check-config", path)
        return path

    @pytest.mark.parametrize(("alertname", "receivers"), RECEIVERS.items())
    def test_our_alert_reaches(self, alertname: str, receivers: str, imported: Path) -> None:
        expect_route(labels_of(alertname), receivers, imported)

    @pytest.mark.parametrize(
        "labels",
        [
            {"alertname": "SlowQuery", "severity": "info"},
            {"alertname": "DiskFull", "severity": "critical"},
            # What else may ask for something, and what else begins with "Act".
            {"alertname": "FailoverNeeded", "action": "recover", "run": "gpt"},
            {"alertname": "ActiveMQBrokerDown", "severity": "critical"},
        ],
        ids=lambda labels: labels["alertname"],
    )
    def test_another_teams_alert_reaches_that_team_only(
        self, labels: dict[str, str], imported: Path
    ) -> None:
        expect_route({**labels, "team": "dba"}, "dba", imported)

    def test_an_alert_of_nobody_goes_where_it_went_before(self, imported: Path) -> None:
        expect_route({"alertname": "DiskFull", "severity": "info"}, "everybody", imported)


@dataclass
class Post:
    """One HTTP request that a stand-in was sent."""

    path: str
    authorization: str | None
    size: int
    body: Any


@dataclass
class StandIn:
    """An HTTP server on loopback that answers 200 and remembers."""

    posts: list[Post] = field(default_factory=list)
    port: int = 0

    @contextlib.contextmanager
    def serving(self) -> Iterator[StandIn]:
        posts = self.posts

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                token = self.headers["Authorization"]
                posts.append(Post(self.path, token, len(body), json.loads(body)))
                self.send_response(200)
                self.send_header("Content-Length", "2")
                self.end_headers()
                self.wfile.write(b"ok")

            def log_message(self, *args: Any) -> None:
                pass

        with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
            self.port = server.server_port
            thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
            thread.start()
            try:
                yield self
            finally:
                server.shutdown()
                thread.join()


def replaced(node: Any, replacements: dict[str, str], used: set[str]) -> Any:
    """The configuration with whole values replaced; `used` collects those that were found."""
    if isinstance(node, dict):
        return {key: replaced(value, replacements, used) for key, value in node.items()}
    if isinstance(node, list):
        return [replaced(value, replacements, used) for value in node]
    if node in replacements:
        used.add(node)
        return replacements[node]
    return node


def render(
    folder: Path, chat: StandIn, mailbox: Mailbox, receiver: StandIn, group_wait: str
) -> Path:
    """The shipped file with the addresses and secrets of this machine, and shorter waits."""

    def secret(name: str, value: str) -> str:
        path = folder / name
        path.write_text(value)
        path.chmod(0o400)
        return str(path)

    chat_url = f"http://127.0.0.1:{chat.port}/services/{CHAT_SECRET}"
    replacements = {
        "/etc/act/chat-url": secret("chat-url", chat_url),
        "/etc/act/smtp-password": secret("smtp-password", MAIL_SECRET),
        "/etc/act/alertmanager-token": secret("receiver-token", TOKEN),
        "mail.example.com:587": f"127.0.0.1:{mailbox.port}",
        "http://localhost:9464/alerts": f"http://127.0.0.1:{receiver.port}/alerts",
        "http://localhost:9464/watchdog": f"http://127.0.0.1:{receiver.port}/watchdog",
    }
    used: set[str] = set()
    config = replaced(yaml.safe_load(CONFIG.read_text()), replacements, used)
    assert used == set(replacements), "the shipped file no longer has these values"
    config["global"]["smtp_require_tls"] = False  # loopback, and the stand-in has no certificate
    parent, trainer = shipped_routes(config)
    parent["group_wait"] = group_wait
    parent["group_interval"] = "1s"
    trainer["group_interval"] = "1s"
    path = folder / "alertmanager.yml"
    path.write_text(yaml.safe_dump(config))
    return path


@dataclass
class Delivery:
    """A running Alertmanager and those whom it tells."""

    server: Server
    url: str
    chat: StandIn
    mailbox: Mailbox
    receiver: StandIn

    def fire(self, *alerts: dict[str, Any]) -> None:
        """Hand alerts over as Prometheus does."""
        request = urllib.request.Request(
            f"{self.url}/api/v2/alerts",
            data=json.dumps(alerts).encode(),
            headers={"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=10) as answer:
            assert answer.status == 200

    def messages(self, run: str) -> list[dict[str, Any]]:
        """The chat messages about a run."""
        attachments = [post.body["attachments"][0] for post in self.chat.posts]
        return [attachment for attachment in attachments if run in attachment["title"]]

    def mails(self, run: str) -> list[email.message.EmailMessage]:
        return [mail for mail in self.mailbox.mails if run in mail["Subject"]]

    def requests(self, run: str) -> list[dict[str, Any]]:
        """What the receiver was sent about a run."""
        bodies = [post.body for post in self.receiver.posts]
        return [body for body in bodies if body["groupLabels"].get("run") == run]

    def wait_for(self, probe: Callable[[], Any], what: str) -> Any:
        return self.server.wait_for(probe, what)

    def settle(self) -> None:
        """Wait until Alertmanager has looked at every group again, so that what is absent now
        stays absent: an alert of a fresh group is told later than all that came before it."""
        run = f"settled-{len(self.chat.posts)}"
        for round_ in ("one", "two"):
            self.fire(alert("ActTrainerStalled", run=f"{run}-{round_}"))
            wait_for(lambda name=f"{run}-{round_}": self.messages(name), "the marking message")


def alert(alertname: str, resolved: bool = False, **labels: str) -> dict[str, Any]:
    """An alert as the rules make it, with some labels replaced, in its annotations too."""
    original = labels_of(alertname)
    annotations = seen_firing(alertname)["exp_annotations"]
    for name, value in labels.items():
        annotations = {
            key: text.replace(original[name], value) for key, text in annotations.items()
        }
    content = {"labels": {**original, **labels}, "annotations": annotations}
    if resolved:
        content["endsAt"] = datetime.now(UTC).isoformat()
    return content


@contextlib.contextmanager
def delivering(folder: Path, group_wait: str) -> Iterator[Delivery]:
    with contextlib.ExitStack() as stack:
        chat = stack.enter_context(StandIn().serving())
        receiver = stack.enter_context(StandIn().serving())
        mailbox = stack.enter_context(Mailbox().serving())
        port = free_port()
        argv = [
            binary("alertmanager"),
            f"--config.file={render(folder, chat, mailbox, receiver, group_wait)}",
            f"--storage.path={folder / 'data'}",
            f"--web.listen-address=127.0.0.1:{port}",
            "--cluster.listen-address=",  # no gossip with others on the network
        ]
        server = stack.enter_context(running("alertmanager", argv, folder))
        url = f"http://127.0.0.1:{port}"

        def is_ready() -> bool:
            with urllib.request.urlopen(f"{url}/-/ready", timeout=30) as answer:
                return bool(answer.status == 200)

        server.wait_for(is_ready, "readiness")
        yield Delivery(server, url, chat, mailbox, receiver)


@pytest.fixture(scope="module")
def delivery(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Delivery]:
    with delivering(tmp_path_factory.mktemp("alertmanager"), "500ms") as opened:
        yield opened


@pytest.fixture(scope="module")
def patient(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Delivery]:
    """Waits so long that on a busy machine too all of a group is taken in."""
    with delivering(tmp_path_factory.mktemp("alertmanager"), "5s") as opened:
        yield opened


class TestStorm:
    def test_is_one_message_and_one_mail(self, patient: Delivery) -> None:
        storm = [
            alert("ActLayerAboveBaseline", run="storm", layer=f"h.{layer}.mlp")
            for layer in range(40)
        ]
        patient.fire(*storm, alert("ActRunaway", run="storm"))
        patient.wait_for(lambda: patient.messages("storm"), "a chat message")
        patient.wait_for(lambda: patient.mails("storm"), "a mail")
        patient.settle()

        (message,) = patient.messages("storm")
        assert message["title"] == "41 firing: run storm"
        lines = message["text"].splitlines()
        assert len([line for line in lines if line.startswith("Act")]) == 8
        assert "... the first 8 of 41" in lines
        assert any(line.startswith("Worst layers: h.") for line in lines)
        assert any(line.startswith("Runbook: https://github.com/act-exporter") for line in lines)
        assert "runbook.md#act" in message["title_link"]
        # The strictest of the chat tools takes 2,048 bytes.
        assert len(message["text"].encode()) < 2048

        (mail,) = patient.mails("storm")
        assert mail["Subject"] == "41 firing: run storm"
        assert mail["To"] == "oncall@example.com"
        body = mail.get_body(("plain",))
        assert body is not None
        assert "Worst layers: h." in body.get_content()
        assert mail.get_body(("html",)) is None

    def test_warnings_of_all_layers_at_once_are_one_message_a_run(self, patient: Delivery) -> None:
        kinds = ("ActLayerDepthSpike", "ActLayerDrift", "ActRankSpread", "ActLayerDead")
        for run in ("flood-a", "flood-b"):
            patient.fire(
                *(
                    alert(kind, run=run, layer=f"h.{layer}.mlp")
                    for kind in kinds
                    for layer in range(30)
                )
            )
        for run in ("flood-a", "flood-b"):
            patient.wait_for(lambda run=run: patient.messages(run), "a chat message")
        patient.settle()
        for run in ("flood-a", "flood-b"):
            (message,) = patient.messages(run)
            assert message["title"] == f"120 firing: run {run}"
            assert len(patient.mails(run)) == 1
            assert patient.requests(run) == []


class TestDelivery:
    def test_secrets_come_from_their_files(self, delivery: Delivery) -> None:
        delivery.fire(alert("ActRunaway", run="secrets"))
        delivery.wait_for(lambda: delivery.messages("secrets"), "a chat message")
        delivery.wait_for(lambda: delivery.mails("secrets"), "a mail")
        delivery.wait_for(lambda: delivery.requests("secrets"), "a delivery to the receiver")
        assert {post.path for post in delivery.chat.posts} == {f"/services/{CHAT_SECRET}"}
        assert set(delivery.mailbox.logins) == {("alertmanager@example.com", MAIL_SECRET)}
        assert {post.authorization for post in delivery.receiver.posts} == {f"Bearer {TOKEN}"}
        assert {post.path for post in delivery.receiver.posts} <= {"/alerts", "/watchdog"}

    def test_the_receiver_gets_each_action_of_a_run_by_itself(self, delivery: Delivery) -> None:
        delivery.fire(
            alert("ActLayerAboveBaseline", run="two-actions"),
            alert("ActLayerNonFinite", run="two-actions"),
            alert("ActRunaway", run="two-actions"),
            alert("ActLayerAboveWindowSustained", run="two-actions", layer="h.9.mlp"),
        )

        # Without a group_wait the first delivery may hold one of two alerts that came together,
        # and the next both.
        def names(action: str) -> set[str]:
            return {
                alert["labels"]["alertname"]
                for body in delivery.requests("two-actions")
                if body["groupLabels"]["action"] == action
                for alert in body["alerts"]
            }

        checkpoint = {"ActLayerAboveBaseline", "ActLayerNonFinite"}
        delivery.wait_for(lambda: names("checkpoint") == checkpoint, "the checkpoint's alerts")
        delivery.wait_for(lambda: names("recover") == {"ActRunaway"}, "the recovery's alert")
        delivery.settle()
        assert names("checkpoint") == checkpoint
        assert names("recover") == {"ActRunaway"}
        recoveries = [
            body
            for body in delivery.requests("two-actions")
            if body["groupLabels"]["action"] == "recover"
        ]
        assert len(recoveries) == 1

    def test_the_receiver_is_sent_a_hundred_alerts_at_most(self, delivery: Delivery) -> None:
        delivery.fire(
            *(alert("ActLayerAboveBaseline", run="large", layer=f"h.{n}") for n in range(150))
        )
        delivery.wait_for(
            lambda: any(
                len(body["alerts"]) + body["truncatedAlerts"] == 150
                for body in delivery.requests("large")
            ),
            "a delivery about all 150",
        )
        assert max(len(body["alerts"]) for body in delivery.requests("large")) == 100
        # The receiver takes 1 MiB; annotations may grow eightfold.
        assert max(post.size for post in delivery.receiver.posts) < 2**20 / 8

    def test_single_steps_above_the_window_are_told_to_nobody(self, delivery: Delivery) -> None:
        delivery.fire(alert("ActLayerAboveWindow", run="quiet"))
        delivery.settle()
        assert delivery.messages("quiet") == []
        assert delivery.mails("quiet") == []
        assert delivery.requests("quiet") == []

    def test_the_worse_alert_silences_the_other_of_its_layer_only(self, delivery: Delivery) -> None:
        delivery.fire(
            alert("ActLayerAboveBaseline", run="silenced", layer="h.1.mlp"),
            alert("ActLayerAboveWindowSustained", run="silenced", layer="h.1.mlp"),
            alert("ActLayerAboveWindowSustained", run="silenced", layer="h.2.mlp"),
        )
        (message,) = delivery.wait_for(lambda: delivery.messages("silenced"), "a chat message")
        assert "h.1.mlp output of silenced reached" in message["text"]
        assert "h.2.mlp output of silenced was over 5" in message["text"]
        assert "h.1.mlp output of silenced was over 5" not in message["text"]

    def test_each_inhibit_rule_silences_the_same_run_and_layer_and_no_other(
        self, delivery: Delivery
    ) -> None:
        silenced = (
            ("ActLayerAboveBaseline", "ActLayerDrift", "layer"),
            ("ActLayerAboveBaseline", "ActLayerDepthSpike", "layer"),
            ("ActLayerNonFinite", "ActLayerHeadroomEnding", "layer"),
            ("ActLossNonFinite", "ActLossSpike", "run"),
            ("ActGradientNonFinite", "ActGradientExplosion", "run"),
        )

        def about(name: str, run: str, layer: str) -> dict[str, Any]:
            more = {"layer": layer} if "layer" in labels_of(name) else {}
            return alert(name, run=run, **more)

        for number, (source, target, level) in enumerate(silenced):
            run = f"inhibit-{number}"
            other = (run, "h.9") if level == "layer" else (f"{run}-other", "h.1")
            delivery.fire(
                about(source, run, "h.1"), about(target, run, "h.1"), about(target, *other)
            )
        for number, (source, target, level) in enumerate(silenced):
            run = f"inhibit-{number}"
            delivery.wait_for(
                # Not the other run's, whose name begins with this one's.
                lambda run=run: any(m["title"].endswith(run) for m in delivery.messages(run)),
                "a chat message",
            )
            ours = [m for m in delivery.messages(run) if not m["title"].endswith("other")]
            lines = [line for m in ours for line in m["text"].splitlines()]
            assert [line for line in lines if line.startswith(f"{source} ")]
            told = [line for line in lines if line.startswith(f"{target} ")]
            if level == "layer":
                assert [line for line in told if "h.9" in line]
                assert not [line for line in told if "h.1" in line]
            else:
                assert told == []
                (others,) = delivery.wait_for(
                    lambda run=run: delivery.messages(f"{run}-other"), "the other run's message"
                )
                assert target in others["text"]

    def test_what_led_to_a_crash_is_told_beside_it(self, delivery: Delivery) -> None:
        """Held alerts are the explanation: an exporter that is down silences none of them."""
        names = ("ActMemoryNearEnd", "ActLayerHeadroomLow", "ActLossSpike", "ActRankSpread")
        delivery.fire(alert("ActExporterDown"), *(alert(name, run="crashed") for name in names))
        delivery.wait_for(
            lambda: all(
                any(name in message["text"] for message in delivery.messages("crashed"))
                for name in names
            ),
            "all of them in the chat",
        )

    def test_the_watchdog_is_told_to_the_receiver_alone(self, delivery: Delivery) -> None:
        delivery.fire(alert("ActWatchdog"))
        delivery.wait_for(
            lambda: [post for post in delivery.receiver.posts if post.path == "/watchdog"],
            "the watchdog",
        )
        delivery.settle()
        assert not any("ActWatchdog" in json.dumps(post.body) for post in delivery.chat.posts)
        assert not any("ActWatchdog" in mail["Subject"] for mail in delivery.mailbox.mails)
        (post,) = (post for post in delivery.receiver.posts if post.path == "/watchdog")
        assert post.authorization == f"Bearer {TOKEN}"
        assert [alert["status"] for alert in post.body["alerts"]] == ["firing"]
        assert not [
            post
            for post in delivery.receiver.posts
            if post.path == "/alerts" and "ActWatchdog" in json.dumps(post.body)
        ]

    def test_headroom_and_a_loss_that_is_no_number_ask_for_a_checkpoint(
        self, delivery: Delivery
    ) -> None:
        for name in ("ActLayerHeadroomLow", "ActLossNonFinite"):
            run = f"asks-{name}"
            delivery.fire(alert(name, run=run))
            (body,) = delivery.wait_for(lambda run=run: delivery.requests(run), "a delivery")
            assert body["groupLabels"] == {"run": run, "action": "checkpoint"}

    def test_the_end_is_told_in_the_chat_and_nowhere_else(self, delivery: Delivery) -> None:
        delivery.fire(alert("ActRunaway", run="ended"))
        delivery.wait_for(lambda: delivery.messages("ended"), "a chat message")
        delivery.wait_for(lambda: delivery.mails("ended"), "a mail")
        delivery.wait_for(lambda: delivery.requests("ended"), "a delivery")
        delivery.fire(alert("ActRunaway", run="ended", resolved=True))
        delivery.wait_for(lambda: len(delivery.messages("ended")) == 2, "the end in the chat")
        delivery.settle()
        assert delivery.messages("ended")[1]["title"] == "over: run ended"
        assert "over: ActRunaway" in delivery.messages("ended")[1]["text"]
        assert len(delivery.mails("ended")) == 1
        assert len(delivery.requests("ended")) == 1

    def test_a_second_anomaly_of_a_run_reaches_the_receiver_again(self, delivery: Delivery) -> None:
        delivery.fire(alert("ActRunaway", run="again"))
        delivery.wait_for(lambda: len(delivery.requests("again")) == 1, "the first delivery")
        delivery.wait_for(lambda: delivery.messages("again"), "a chat message")
        delivery.fire(alert("ActRunaway", run="again", resolved=True))
        delivery.wait_for(lambda: len(delivery.messages("again")) == 2, "the end in the chat")
        delivery.settle()
        delivery.fire(alert("ActRunaway", run="again"))
        delivery.wait_for(lambda: len(delivery.requests("again")) == 2, "the second delivery")

    def test_an_exporter_without_a_run_is_told_to_people(self, delivery: Delivery) -> None:
        delivery.fire(alert("ActExporterDown"))
        (message,) = delivery.wait_for(
            lambda: delivery.messages("ActExporterDown"), "a chat message"
        )
        assert message["title"] == "1 firing: ActExporterDown"
        delivery.wait_for(lambda: delivery.mails("ActExporterDown"), "a mail")
