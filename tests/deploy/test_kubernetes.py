"""deploy/kubernetes: rendered as committed, valid by schema, and meaning what the plain files do.

No cluster runs where these tests do. Kubernetes' own objects are held to its JSON schemas, the
operator's to models made from its CRDs (0.80, the newest for this Python), and what is inside to
promtool, amtool and the receiver itself.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, ClassVar

import kubernetes_validate
import pytest
import yaml
from cloudcoil.models.prometheus_operator import v1, v1alpha1

from act_exporter.rules import RuleThresholds, write_rules
from alerting.settings import load_settings
from deploy.demo.servers import REPOSITORY, binary
from deploy.kubernetes.alertmanager import ConversionError, alertmanager_config
from deploy.kubernetes.render import Cluster, render

FOLDER = REPOSITORY / "deploy" / "kubernetes"
MANIFESTS = sorted((FOLDER / "manifests").glob("*.yaml"))
PLAIN_RULES = REPOSITORY / "prometheus" / "rules"
CASES = sorted((REPOSITORY / "tests" / "prometheus").glob("*.yml"))
PLAIN_ROUTES = REPOSITORY / "alerting" / "alertmanager.yml"
OPERATORS = {
    "PodMonitor": v1.PodMonitor,
    "ServiceMonitor": v1.ServiceMonitor,
    "PrometheusRule": v1.PrometheusRule,
    "AlertmanagerConfig": v1alpha1.AlertmanagerConfig,
}
# The oldest that still got fixes when this was written, and the newest.
KUBERNETES = ("1.32", "1.37")


def objects() -> list[dict[str, Any]]:
    return [
        found
        for path in MANIFESTS
        if path.name != "kustomization.yaml"
        for found in yaml.safe_load_all(path.read_text())
    ]


def the(kind: str, name: str) -> Any:
    (found,) = [
        each for each in objects() if (each["kind"], each["metadata"]["name"]) == (kind, name)
    ]
    return found


def ids(item: Any) -> str:
    return item.name if isinstance(item, Path) else f"{item['kind']}-{item['metadata']['name']}"


def tool(name: str, *arguments: str | Path) -> str:
    """Its output; fails the test with it when the tool is not content."""
    done = subprocess.run(
        [binary(name), *map(str, arguments)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def command(*arguments: str | Path, folder: Path = REPOSITORY) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "deploy.kubernetes", *map(str, arguments)],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


class TestRendering:
    def test_the_committed_files_are_what_is_rendered(self) -> None:
        """Else: `make manifests`, also after a change of rules, routes or settings."""
        committed = {path.name: path.read_text() for path in MANIFESTS}
        assert committed == render(Cluster())

    def test_another_clusters_names_are_everywhere(self) -> None:
        cluster = Cluster(namespace="llm", monitoring="watch", image="registry.example.com/act:2")
        text = "\n---\n".join(render(cluster).values())
        for left in ("<<", "namespace: training", ": monitoring\n", "act-receiver:0.1.0"):
            assert left not in text.replace("pairs: {release: monitoring}", "")
        assert "http://act-receiver.llm.svc:9464/alerts" in text

    def test_what_assets_wrote_and_a_user_changed_is_rendered(self, tmp_path: Path) -> None:
        written = tmp_path / "monitoring"
        subprocess.run(
            [sys.executable, "-m", "act_exporter.cli", "assets", written],
            check=True,
            capture_output=True,
        )
        write_rules(written / "prometheus" / "rules", RuleThresholds(hard=47))
        routes = written / "alerting" / "alertmanager.yml"
        routes.write_text(routes.read_text().replace("oncall@example.com", "llm@example.com"))
        command("--namespace", "llm", "-o", tmp_path / "out", folder=written)
        assert ":baseline_ratio[6m]) > 47" in (tmp_path / "out/rules-activations.yaml").read_text()
        assert "to: llm@example.com" in (tmp_path / "out/alertmanager-config.yaml").read_text()

    def test_kustomize_takes_all_but_trainers(self) -> None:
        listed = yaml.safe_load((FOLDER / "manifests" / "kustomization.yaml").read_text())
        kept = {path.name for path in MANIFESTS} - {"kustomization.yaml", "trainer.yaml"}
        assert set(listed["resources"]) == kept

    @pytest.mark.parametrize(
        ("changed", "said"),
        [
            ({"route": {"receiver": "a", "routes": [{}, {}]}}, "2 routes stand below the root"),
            ({"receivers": [{"name": "a", "pagerduty_configs": []}]}, "pagerduty_configs is not"),
            ({"route": {"routes": [{"matchers": ["run"]}]}}, "the matcher 'run' is not"),
        ],
    )
    def test_what_has_no_counterpart_is_named(self, changed: dict[str, Any], said: str) -> None:
        source = {**yaml.safe_load(PLAIN_ROUTES.read_text()), **changed}
        with pytest.raises(ConversionError, match=re.escape(said)):
            alertmanager_config(source, "training")


class TestSchemas:
    @pytest.mark.parametrize("found", objects(), ids=ids)
    def test_each_object_is_valid(self, found: dict[str, Any]) -> None:
        if model := OPERATORS.get(found["kind"]):
            # The models leave out what they do not know, so an unknown key shows as a difference.
            parsed = model.model_validate(found)
            assert parsed.model_dump(mode="json", by_alias=True, exclude_unset=True) == found
        else:
            for version in KUBERNETES:
                kubernetes_validate.validate(found, version, strict=True)

    def test_the_routes_within_routes_are_valid(self) -> None:
        """A CRD cannot say that a route has routes; the operator refuses unknown keys itself."""

        def check(route: dict[str, Any]) -> None:
            parsed = v1alpha1.Route.model_validate({**route, "routes": None})
            known = parsed.model_dump(mode="json", by_alias=True, exclude_unset=True)
            assert {**known, "routes": None} == {**route, "routes": None}
            for child in route.get("routes", []):
                check(child)

        check(the("AlertmanagerConfig", "act")["spec"]["route"])

    def test_the_schemas_notice_a_slip(self) -> None:
        slip = the("Deployment", "act-receiver")
        slip["spec"]["template"]["spec"]["containers"][0]["livenesProbe"] = {}
        with pytest.raises(kubernetes_validate.ValidationError):
            kubernetes_validate.validate(slip, KUBERNETES[0], strict=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The groups of each PrometheusRule, as the operator mounts them, under the plain name."""
    folder = tmp_path_factory.mktemp("rules")
    for found in objects():
        if found["kind"] == "PrometheusRule":
            name = found["metadata"]["name"].removeprefix("act-")
            (folder / f"{name}.yml").write_text(yaml.safe_dump(found["spec"]))
    return folder


class TestRules:
    def test_promtool_finds_all_of_them_valid(self, folder: Path) -> None:
        plain = {path.name for path in PLAIN_RULES.glob("*.yml")}
        assert {path.name for path in folder.glob("*.yml")} == plain
        tool("promtool", "check", "rules", *sorted(folder.glob("*.yml")))

    @pytest.mark.parametrize("path", CASES, ids=ids)
    def test_the_plain_rules_cases_pass_with_the_namespace(
        self, path: Path, folder: Path, tmp_path: Path
    ) -> None:
        # As texts, since promtool's `0x40` is no hexadecimal number.
        cases = yaml.load(path.read_text(), yaml.BaseLoader)
        cases["rule_files"] = [str(folder / Path(name).name) for name in cases["rule_files"]]
        for test in cases["tests"]:
            for case in test.get("promql_expr_test", []):
                for sample in case["exp_samples"]:
                    sample["value"] = float(sample["value"])
            for case in test["alert_rule_test"]:
                for alert in case["exp_alerts"]:
                    alert["exp_labels"]["namespace"] = "training"
        file = tmp_path / path.name
        file.write_text(json.dumps(cases))
        tool("promtool", "test", "rules", file)

    @pytest.mark.parametrize("path", CASES, ids=ids)
    def test_as_many_alerts_fire_with_the_labels_that_the_operator_gives_targets(
        self, path: Path, folder: Path, tmp_path: Path
    ) -> None:
        """Namespace and container are the same for all ranks; pod and node are dropped."""
        cases = yaml.load(path.read_text(), yaml.BaseLoader)
        cases["rule_files"] = [str(folder / Path(name).name) for name in cases["rule_files"]]
        for test in cases["tests"]:
            for series in test["input_series"]:
                given = 'namespace="training",container="trainer"}'
                name, _, labels = series["series"].partition("{")
                series["series"] = f"{name}{{{labels.rstrip('}')},{given}".replace("{,", "{")
            test["promql_expr_test"] = [
                {
                    "expr": f'count(ALERTS{{alertname="{case["alertname"]}",alertstate="firing"}})',
                    "eval_time": case["eval_time"],
                    "exp_samples": [{"labels": "{}", "value": len(case["exp_alerts"])}]
                    if case["exp_alerts"]
                    else [],
                }
                for case in test.pop("alert_rule_test")
            ]
        file = tmp_path / path.name
        file.write_text(json.dumps(cases))
        tool("promtool", "test", "rules", file)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The object in an Alertmanager's configuration, as the operator's documentation says."""
    spec = the("AlertmanagerConfig", "act")["spec"]
    namespace = {"name": "namespace", "value": "training", "matchType": "="}
    first = route(spec["route"])
    first["matchers"].append(matcher(namespace))
    first["continue"] = True
    config = {
        # kube-prometheus' own default takes nobody's alerts further.
        "route": {"receiver": "null", "routes": [first]},
        "inhibit_rules": [
            {
                "source_matchers": [*map(matcher, rule["sourceMatch"]), matcher(namespace)],
                "target_matchers": [*map(matcher, rule["targetMatch"]), matcher(namespace)],
                "equal": rule["equal"],
            }
            for rule in spec["inhibitRules"]
        ],
        "receivers": [
            {"name": "null"},
            *({"name": f"training/act/{each['name']}"} for each in spec["receivers"]),
        ],
    }
    file = tmp_path_factory.mktemp("alertmanager") / "alertmanager.yml"
    file.write_text(yaml.safe_dump(config))
    return file


def route(found: dict[str, Any]) -> dict[str, Any]:
    """A route of the operator's as Alertmanager has it."""
    plain = {re.sub("[A-Z]", lambda c: f"_{c[0].lower()}", key): found[key] for key in found}
    plain["receiver"] = f"training/act/{found['receiver']}"
    if "matchers" in found:
        plain["matchers"] = [matcher(each) for each in found["matchers"]]
    plain["routes"] = [route(child) for child in found.get("routes", [])]
    return plain


def matcher(found: dict[str, str]) -> str:
    return f'{found["name"]}{found["matchType"]}"{found["value"]}"'


def receivers(config: Path, labels: dict[str, str]) -> list[str]:
    given = [f"{name}={value}" for name, value in labels.items()]
    said = tool("amtool", "config", "routes", "test", f"--config.file={config}", *given)
    return said.strip().split(",")


def plain_alerts() -> list[dict[str, Any]]:
    return [
        rule
        for path in sorted(PLAIN_RULES.glob("*.yml"))
        for group in yaml.safe_load(path.read_text())["groups"]
        for rule in group["rules"]
        if "alert" in rule
    ]


class TestRoutes:
    def test_amtool_takes_it(self, config: Path) -> None:
        plain = yaml.safe_load(PLAIN_ROUTES.read_text())
        said = tool("amtool", "check-config", config)
        assert f"{len(plain['inhibit_rules'])} inhibit rules" in said
        assert f"{len(plain['receivers']) + 1} receivers" in said

    @pytest.mark.parametrize("alert", plain_alerts(), ids=lambda alert: alert["alert"])
    def test_an_alert_reaches_whom_the_plain_file_sends_it_to(
        self, config: Path, alert: dict[str, Any]
    ) -> None:
        labels = {"alertname": alert["alert"], "run": "gpt", **alert["labels"]}
        plain = receivers(PLAIN_ROUTES, labels)
        here = receivers(config, {**labels, "namespace": "training"})
        assert here == [f"training/act/{name}" for name in plain]

    def test_alerts_of_another_namespace_are_left_alone(self, config: Path) -> None:
        assert receivers(config, {"namespace": "others", "alertname": "ActRunaway"}) == ["null"]


class TestMessages:
    plain: ClassVar = yaml.safe_load(PLAIN_ROUTES.read_text())

    def test_people_read_the_same_texts(self) -> None:
        (people, *_) = the("AlertmanagerConfig", "act")["spec"]["receivers"]
        (plain, *_) = self.plain["receivers"]
        for key in ("title", "text", "fallback"):
            assert people["slackConfigs"][0][key] == plain["slack_configs"][0][key]
        (mail,) = people["emailConfigs"]
        assert mail["text"] == plain["email_configs"][0]["text"]
        assert mail["html"] == ""
        assert mail["smarthost"] == self.plain["global"]["smtp_smarthost"]
        assert mail["requireTLS"] is True
        subject = plain["email_configs"][0]["headers"]["Subject"]
        assert mail["headers"] == [{"key": "Subject", "value": subject}]

    def test_no_secret_is_in_it(self) -> None:
        """Each file of the plain one is a key of the Secret, as the guide makes it."""
        named = set(re.findall(r"^[^#\n]*_file: /etc/act/(\S+)$", PLAIN_ROUTES.read_text(), re.M))
        spec = json.dumps(the("AlertmanagerConfig", "act")["spec"])
        keys = re.findall(r'{"name": "act-alertmanager", "key": "([^"]+)"}', spec)
        assert set(keys) == named
        guide = (REPOSITORY / "docs" / "deployment.md").read_text()
        assert all(f"--from-file={name}" in guide for name in named)

    def test_the_receivers_bots_are_reached_where_they_are_uncommented(self) -> None:
        text = PLAIN_ROUTES.read_text()
        start = text.index("    # webhook_configs:")
        end = text.index("\n\n", start)
        text = text[:start] + re.sub("^    # ", "    ", text[start:end], flags=re.M) + text[end:]
        spec = alertmanager_config(yaml.safe_load(text), "training")
        (webhook,) = spec["receivers"][0]["webhookConfigs"]
        assert webhook["url"] == "http://act-receiver.training.svc:9464/messages"


class TestReceiver:
    def test_it_starts_with_the_settings_of_its_config_map(self, tmp_path: Path) -> None:
        token = tmp_path / "receiver-token"
        token.touch(0o600)
        token.write_text("secret")
        config = tmp_path / "receiver.yml"
        text = the("ConfigMap", "act-receiver")["data"]["receiver.yml"]
        config.write_text(text.replace("/etc/act/receiver-token", str(token)))
        settings = load_settings(config, {})
        assert (settings.host, settings.port) == ("0.0.0.0", 9464)
        mounted = {
            mount["mountPath"]
            for mount in pod("Deployment", "act-receiver")["containers"][0]["volumeMounts"]
        }
        assert {str(settings.runs), str(settings.database.parent)} <= mounted

    def test_alertmanager_and_prometheus_find_it(self) -> None:
        service = the("Service", "act-receiver")
        address = f"http://{service['metadata']['name']}.training.svc:9464"
        receivers = {
            each["name"]: each for each in the("AlertmanagerConfig", "act")["spec"]["receivers"]
        }
        for name, path in {"trainer": "/alerts", "watchdog": "/watchdog"}.items():
            (webhook,) = receivers[name]["webhookConfigs"]
            assert webhook["url"] == address + path
            assert webhook["httpConfig"]["authorization"]["credentials"]["key"]
        monitor = the("ServiceMonitor", "act-receiver")["spec"]
        wanted = monitor["selector"]["matchLabels"].items()
        assert wanted <= service["metadata"]["labels"].items()
        # The job by which ActReceiverDown knows it.
        assert service["metadata"]["labels"][monitor["jobLabel"]] == "act-receiver"
        assert monitor["endpoints"][0]["port"] == service["spec"]["ports"][0]["name"]


class TestTrainer:
    def test_monitor_and_policy_see_its_ranks(self) -> None:
        template = the("Job", "gpt")["spec"]["template"]
        labels = template["metadata"]["labels"].items()
        monitor = the("PodMonitor", "act-exporter")["spec"]
        policy = the("NetworkPolicy", "act-exporter")["spec"]
        assert monitor["selector"]["matchLabels"].items() <= labels
        assert policy["podSelector"]["matchLabels"].items() <= labels
        (container,) = template["spec"]["containers"]
        keep, job = monitor["podMetricsEndpoints"][0]["relabelings"]
        (scraped,) = policy["ingress"][0]["ports"]
        for rank, port in enumerate(container["ports"]):
            assert re.fullmatch(keep["regex"], port["name"])
            assert port["containerPort"] == 9460 + rank
            assert scraped["port"] <= port["containerPort"] <= scraped["endPort"]
        assert f"--nproc-per-node={len(container['ports'])}" in container["args"]
        assert job["replacement"] == "act-exporter"
        assert "ACT_HOST" in {variable["name"] for variable in container["env"]}

    def test_labels_that_differ_between_ranks_are_dropped_as_the_plain_file_says(self) -> None:
        (dropped,) = the("PodMonitor", "act-exporter")["spec"]["podMetricsEndpoints"][0][
            "metricRelabelings"
        ]
        plain = (REPOSITORY / "prometheus" / "prometheus.yml").read_text()
        assert f"regex: {dropped['regex']}" in plain


def pod(kind: str, name: str) -> Any:
    return the(kind, name)["spec"]["template"]["spec"]


@pytest.mark.parametrize(("kind", "name"), [("Deployment", "act-receiver"), ("Job", "gpt")])
def test_a_pod_keeps_to_the_restricted_level(kind: str, name: str) -> None:
    """As the Pod Security Standards have it, which the namespace enforces."""
    spec = pod(kind, name)
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert not spec["automountServiceAccountToken"]
    for container in spec["containers"] + spec.get("initContainers", []):
        context = container["securityContext"]
        assert context["allowPrivilegeEscalation"] is False
        assert context["capabilities"] == {"drop": ["ALL"]}
    allowed = {"configMap", "secret", "emptyDir", "persistentVolumeClaim"}
    assert {key for volume in spec["volumes"] for key in volume} - {"name"} <= allowed


def test_receiver_and_trainer_are_one_user_of_the_run_folders() -> None:
    users = [
        pod(kind, name)["securityContext"]["runAsUser"]
        for kind, name in (("Deployment", "act-receiver"), ("Job", "gpt"))
    ]
    assert users[0] == users[1]
