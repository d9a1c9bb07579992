"""alertmanager.yml as an AlertmanagerConfig of prometheus-operator.

The operator's form (monitoring.coreos.com/v1alpha1) has the same keys in camel case, secrets by
name in place of files, matchers in parts, and no `global`, so what that says about mail is repeated
at each address. The operator then puts the one route in front of its Alertmanager's own, with
`namespace="..."` as a further matcher and `continue: true`, gives inhibit rules that matcher too,
and calls a receiver NAMESPACE/NAME/RECEIVER. All alerts of the rendered rules have that label.
"""

from __future__ import annotations

import re
from pathlib import PurePosixPath
from typing import Any

SECRET = "act-alertmanager"  # noqa: S105 - the name of one
"""The Secret with a key for each file that alertmanager.yml names."""

_MATCHER = re.compile(r'\s*(\w+)\s*(=~|!~|!=|=)\s*"?([^"\\]*)"?\s*')
_UPPER = {"url": "URL", "tls": "TLS", "http2": "HTTP2"}
_RECEIVER = "//localhost:9464/"


class ConversionError(ValueError):
    """Something in alertmanager.yml has no counterpart; the message says what."""


def alertmanager_config(source: dict[str, Any], namespace: str) -> dict[str, Any]:
    """The object's `spec`.

    Args:
        source: alertmanager.yml.
        namespace: where object and webhook receiver are.

    Raises:
        ConversionError: it has something that this function cannot say in the operator's form.
    """
    routes = source["route"].get("routes", [])
    if len(routes) != 1:
        raise ConversionError(
            f"{len(routes)} routes stand below the root of alertmanager.yml, and an"
            " AlertmanagerConfig has one; put yours below that one"
        )
    mail = {
        key.removeprefix("smtp_"): value
        for key, value in source.get("global", {}).items()
        if key.startswith("smtp_")
    }
    return {
        "route": _route(routes[0]),
        "inhibitRules": [
            {
                "sourceMatch": [_matcher(text) for text in rule["source_matchers"]],
                "targetMatch": [_matcher(text) for text in rule["target_matchers"]],
                "equal": rule["equal"],
            }
            for rule in source.get("inhibit_rules", [])
        ],
        "receivers": [_receiver(receiver, mail, namespace) for receiver in source["receivers"]],
    }


def _route(route: dict[str, Any]) -> dict[str, Any]:
    converted = {_camel(key): value for key, value in route.items()}
    if "matchers" in route:
        converted["matchers"] = [_matcher(text) for text in route["matchers"]]
    if "routes" in route:
        converted["routes"] = [_route(child) for child in route["routes"]]
    return converted


def _matcher(text: str) -> dict[str, str]:
    parts = _MATCHER.fullmatch(text)
    if parts is None:
        raise ConversionError(f'the matcher {text!r} is not of the form name="value"')
    return {"name": parts[1], "value": parts[3], "matchType": parts[2]}


def _receiver(receiver: dict[str, Any], mail: dict[str, Any], namespace: str) -> dict[str, Any]:
    converted: dict[str, Any] = {}
    for key, value in receiver.items():
        if key == "name":
            converted["name"] = value
        elif key == "email_configs":
            converted["emailConfigs"] = [_email({**mail, **config}) for config in value]
        elif key == "webhook_configs":
            converted["webhookConfigs"] = [_webhook(config, namespace) for config in value]
        elif key == "slack_configs":
            converted["slackConfigs"] = [_keys(config) for config in value]
        else:
            raise ConversionError(f"receiver {receiver['name']}: {key} is not known here")
    return converted


def _email(config: dict[str, Any]) -> dict[str, Any]:
    converted = _keys(config)
    headers = config.get("headers", {})
    converted["headers"] = [{"key": key, "value": value} for key, value in headers.items()]
    return converted


def _webhook(config: dict[str, Any], namespace: str) -> dict[str, Any]:
    converted = _keys(config)
    if "url" in converted:
        # Alertmanager has a pod of its own, and the receiver another one.
        service = f"//act-receiver.{namespace}.svc:9464/"
        converted["url"] = converted["url"].replace(_RECEIVER, service)
    return converted


def _keys(config: dict[str, Any]) -> dict[str, Any]:
    """In camel case, at all depths; a file with a secret becomes the key of a Secret."""
    converted: dict[str, Any] = {}
    for key, value in config.items():
        if key.endswith("_file"):
            secret = {"name": SECRET, "key": PurePosixPath(value).name}
            converted[_camel(key.removesuffix("_file"))] = secret
        else:
            converted[_camel(key)] = _keys(value) if isinstance(value, dict) else value
    return converted


def _camel(key: str) -> str:
    first, *others = key.split("_")
    return first + "".join(_UPPER.get(word, word.capitalize()) for word in others)
