"""A running Alertmanager as a client of its API sees it: an alert given to it, and what came of it.

The receiver never asks Alertmanager anything; only a drill does.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import requests
import yaml
from prometheus_client.parser import text_string_to_metric_families

from alerting.exceptions import AlertingError, ConfigError

ANSWER_SECONDS = 5.0
"""Its API answers from memory, in milliseconds."""
_TRIED = "alertmanager_notification_requests_total"
_NOT_TAKEN = "alertmanager_notification_requests_failed_total"
_STATES = ("active", "suppressed")
"""Any other is that of an alert which no route has seen yet."""


class AlertmanagerError(AlertingError):
    """It does not answer, or refuses what it was given."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Taken:
    """An alert as Alertmanager has it.

    Attributes:
        receivers: names of its receivers that get it.
        suppressed: whether a silence or an inhibit rule keeps it from them.
    """

    receivers: tuple[str, ...]
    suppressed: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Count:
    """Attempts to send a notification by one kind of integration, and how many were not taken."""

    tried: float = 0.0
    failed: float = 0.0

    def since(self, before: Count) -> Count:
        """What came on top of `before`."""
        return Count(tried=self.tried - before.tried, failed=self.failed - before.failed)


class Alertmanager:
    """Its API.

    Args:
        url: address, with user and password where it asks for them.

    Raises:
        ConfigError: the address is none.
        AlertmanagerError: (every method) it does not answer, or refuses.
    """

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError("--alertmanager: must be an address such as http://localhost:9093.")
        self._base = url.rstrip("/")
        # Never the user and password of the address.
        self.shown = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}".rstrip("/")

    def give(self, alert: Mapping[str, Any]) -> None:
        """Post one alert, as Prometheus does."""
        self._ask("POST", "/api/v2/alerts", json=[alert])

    def find(self, label: str, value: str) -> Taken | None:
        """The alert with that label, or None until it was routed.

        Args:
            label: a label's name.
            value: letters, digits and hyphens, so that it needs no quoting.
        """
        answer = self._ask("GET", "/api/v2/alerts", params={"filter": f'{label}="{value}"'})
        for alert in answer.json():
            state = alert["status"]["state"]
            if state in _STATES:
                names = tuple(receiver["name"] for receiver in alert["receivers"])
                return Taken(receivers=names, suppressed=state == "suppressed")
        return None

    def integrations(self, receivers: Iterable[str]) -> tuple[str, ...]:
        """The kinds by which those receivers are told ("slack", "email", "webhook")."""
        original = self._ask("GET", "/api/v2/status").json()["config"]["original"]
        wanted = set(receivers)
        kinds = {
            key.removesuffix("_configs")
            for receiver in yaml.safe_load(original)["receivers"]
            if receiver["name"] in wanted
            for key, entries in receiver.items()
            if key.endswith("_configs") and entries
        }
        return tuple(sorted(kinds))

    def counts(self) -> dict[str, Count]:
        """What it has sent so far, by kind of integration: 0.25 does not count by receiver."""
        page = self._ask("GET", "/metrics").text
        try:
            families = list(text_string_to_metric_families(page))
        except ValueError:
            raise AlertmanagerError(f"{self.shown}/metrics is no page of Alertmanager's") from None
        tried: dict[str, float] = {}
        failed: dict[str, float] = {}
        for sample in (sample for family in families for sample in family.samples):
            counts = {_TRIED: tried, _NOT_TAKEN: failed}.get(sample.name)
            if counts is not None:
                # Later versions may count an integration by further labels.
                kind = sample.labels.get("integration", "")
                counts[kind] = counts.get(kind, 0.0) + sample.value
        return {k: Count(tried=n, failed=failed.get(k, 0.0)) for k, n in tried.items()}

    def _ask(self, method: str, path: str, **more: Any) -> requests.Response:
        try:
            answer = requests.request(method, self._base + path, timeout=ANSWER_SECONDS, **more)
        except requests.RequestException as error:
            # Its own words may hold the address with the password.
            raise AlertmanagerError(
                f"Alertmanager does not answer at {self.shown} ({type(error).__name__})"
            ) from None
        if not answer.ok:
            raise AlertmanagerError(
                f"{self.shown} answers {method} {path} with {answer.status_code}"
            )
        return answer
