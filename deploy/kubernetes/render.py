"""Render the manifests: what is written by hand here, and what comes from the plain files.

`templates/` has the objects that only Kubernetes has, with `<<namespace>>` and the like. The rules,
the receiver's settings and Alertmanager's routes are taken from `prometheus/` and `alerting/` as
they stand, comments included where the form allows it, and so are the times of the scrapes.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from textwrap import indent
from typing import Any

import yaml

from deploy.kubernetes.alertmanager import ConversionError, alertmanager_config

SOURCE = Path(__file__).resolve().parents[2]
"""The folder that holds `prometheus`, `alerting` and `deploy`: a checkout's, or what
`act-exporter assets` has written."""

_TOKEN = re.compile(r"<<(\w+)>>")
_GROUP = re.compile(r"^  - name: .+\n", re.MULTILINE)
_LABELS = re.compile(r"^        labels:\n", re.MULTILINE)
_RENDERED = "# Rendered by `python -m deploy.kubernetes`"
_LATER = ("trainer.yaml",)
"""Of the templates: what is applied for each run, and not with the rest."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cluster:
    """What differs from cluster to cluster.

    Attributes:
        namespace: of trainers, receiver and rules.
        monitoring: the namespace of Prometheus and Alertmanager.
        image: the receiver's, built from deploy/compose/Dockerfile.
    """

    namespace: str = "training"
    monitoring: str = "monitoring"
    image: str = "act-receiver:0.1.0"


def render(cluster: Cluster, source: Path = SOURCE) -> dict[str, str]:
    """The text of each manifest, by its file's name.

    Args:
        cluster: what to render for.
        source: where the plain files are.

    Raises:
        ConversionError: a plain file has something that has no counterpart.
    """
    prometheus = yaml.safe_load((source / "prometheus" / "prometheus.yml").read_text())["global"]
    values = {
        "namespace": cluster.namespace,
        "monitoring": cluster.monitoring,
        "image": cluster.image,
        "scrape_interval": prometheus["scrape_interval"],
        "scrape_timeout": prometheus["scrape_timeout"],
    }
    texts = {
        path.name: f"{_RENDERED} from templates/{path.name}.\n#\n"
        + _TOKEN.sub(lambda token: values[token[1]], path.read_text())
        for path in sorted((Path(__file__).parent / "templates").glob("*.yaml"))
    }
    for path in sorted((source / "prometheus" / "rules").glob("*.yml")):
        texts[f"rules-{path.stem}.yaml"] = _rule(
            path, cluster.namespace, prometheus["evaluation_interval"]
        )
    alerting = source / "alerting"
    texts["receiver-config.yaml"] = _receiver_config(alerting / "receiver.yml", cluster.namespace)
    texts["alertmanager-config.yaml"] = _alertmanager_config(
        alerting / "alertmanager.yml", cluster.namespace
    )
    texts["kustomization.yaml"] = _kustomization(sorted(set(texts) - set(_LATER)))
    return texts


def _rule(path: Path, namespace: str, interval: str) -> str:
    """A rule file as a PrometheusRule: the file's own text, indented."""
    original = path.read_text()
    text = _GROUP.sub(rf"\g<0>    interval: {interval}\n", original)
    text = _LABELS.sub(rf"\g<0>          namespace: {namespace}\n", text)
    expected = yaml.safe_load(original)
    for group in expected["groups"]:
        group["interval"] = interval
        for rule in group["rules"]:
            if "alert" in rule:
                rule["labels"] = {"namespace": namespace, **rule["labels"]}
    if yaml.safe_load(text) != expected:
        raise ConversionError(f"{path} is not laid out as `act-exporter rules` does it")
    head, groups = text.split("\ngroups:\n")
    return (
        f"{_RENDERED} from prometheus/rules/{path.name}, which says:\n#\n{head}\n"
        "# Each alert has a further label, `namespace`: the operator's routes ask for it, and one\n"
        "# that goes by no series (ActWatchdog, ActExporterAbsent) would have none. A group has\n"
        "# the interval of prometheus.yml, since the operator's default is 30 s.\n"
        + _object("monitoring.coreos.com/v1", "PrometheusRule", f"act-{path.stem}", namespace)
        + "spec:\n  groups:\n"
        + indent(groups, "  ")
    )


def _receiver_config(path: Path, namespace: str) -> str:
    """receiver.yml in a ConfigMap, with the paths and the address of a pod."""
    text = path.read_text()
    for key, value in {
        "listen": "0.0.0.0:9464",
        "allow_remote": "true  # in the cluster; network.yaml says who may connect",
        "runs": "/runs",
        "database": "/var/lib/act/receiver.sqlite",
    }.items():
        text, found = re.subn(rf"^{key}: .*$", f"{key}: {value}", text, flags=re.MULTILINE)
        if found != 1:
            raise ConversionError(f"{path} has {found} lines that begin with `{key}: `")
    return (
        f"{_RENDERED} from alerting/receiver.yml. A pod keeps what it began with;\n"
        "# `kubectl rollout restart deployment/act-receiver` makes a new one.\n"
        + _object("v1", "ConfigMap", "act-receiver", namespace)
        + "data:\n  receiver.yml: |\n"
        + indent(text, "    ")
    )


def _alertmanager_config(path: Path, namespace: str) -> str:
    spec = alertmanager_config(yaml.safe_load(path.read_text()), namespace)
    text = yaml.dump({"spec": spec}, Dumper=_Dumper, sort_keys=False, width=100)
    return (
        f"{_RENDERED} from alerting/alertmanager.yml, whose comments give the reasons.\n"
        + _object("monitoring.coreos.com/v1alpha1", "AlertmanagerConfig", "act", namespace)
        + text
    )


def _kustomization(resources: list[str]) -> str:
    return (
        f"{_RENDERED}: all but the trainers, for `kubectl apply -k`.\n"
        "apiVersion: kustomize.config.k8s.io/v1beta1\n"
        "kind: Kustomization\n"
        "# Prometheus and Alertmanager take up what their selectors name: with\n"
        "# kube-prometheus-stack its release's label.\n"
        "# labels:\n"
        "#   - pairs: {release: monitoring}\n"
        "resources:\n" + "".join(f"  - {name}\n" for name in resources)
    )


def _object(version: str, kind: str, name: str, namespace: str) -> str:
    return (
        f"apiVersion: {version}\nkind: {kind}\n"
        f"metadata:\n  name: {name}\n  namespace: {namespace}\n"
    )


class _Dumper(yaml.SafeDumper):
    """Texts of several lines as they are read, and no anchors, which people lose sight of."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = "|" if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _text)
