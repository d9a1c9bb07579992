"""Alertmanager's webhook payload, version 4, as the receiver accepts it.

Strict where a wrong guess would act on the wrong run (status, labels), tolerant where Alertmanager
grows: unknown fields are ignored, fields that people's messages alone use have defaults. A group
may hold firing and resolved alerts together, so the group's own status decides nothing here.
The text is hostile until it has passed: counts and lengths are bounded.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import (
    AwareDatetime,
    BaseModel,
    ConfigDict,
    FailFast,
    Field,
    StringConstraints,
    ValidationError,
)

MAX_ALERTS = 5_000
"""Alerts in one delivery: five times the largest group that we have seen sent (1,000)."""
MAX_LABELS = 128
"""Labels, or annotations, of one alert; Prometheus' own series rarely have 30."""
MAX_NAME = 256
"""Characters of a label's or annotation's name."""
MAX_LABEL_VALUE = 4_096
"""Characters of a label value, of URLs and of keys: a module's full name is far under it."""
MAX_ANNOTATION = 65_536
"""Characters of an annotation: a description may list many layers, and must not cost a rollback."""

Name = Annotated[str, StringConstraints(min_length=1, max_length=MAX_NAME)]
Value = Annotated[str, StringConstraints(max_length=MAX_LABEL_VALUE)]
Text = Annotated[str, StringConstraints(max_length=MAX_ANNOTATION)]
Labels = Annotated[dict[Name, Value], Field(max_length=MAX_LABELS)]
Annotations = Annotated[dict[Name, Text], Field(max_length=MAX_LABELS)]


class PayloadError(ValueError):
    """The body is no Alertmanager payload; the message says in one sentence why.

    Attributes:
        is_json: whether it was JSON at all.
    """

    def __init__(self, message: str, *, is_json: bool) -> None:
        super().__init__(message)
        self.is_json = is_json


def _camel(name: str) -> str:
    first, *rest = name.split("_")
    return first + "".join("URL" if word == "url" else word.capitalize() for word in rest)


class _Model(BaseModel):
    # Alertmanager writes camelCase; no field is coerced from another type.
    model_config = ConfigDict(extra="ignore", frozen=True, strict=True, alias_generator=_camel)


class Alert(_Model):
    """One alert of a group."""

    status: Literal["firing", "resolved"]
    labels: Labels
    annotations: Annotations = Field(default_factory=dict)
    starts_at: AwareDatetime | None = None
    ends_at: AwareDatetime | None = None
    generator_url: Value = ""
    fingerprint: Value = ""


class Payload(_Model):
    """One notification: a group of alerts for one receiver."""

    version: Literal["4"]
    status: Literal["firing", "resolved"]
    # Without FailFast a MiB of `{},` is 680,000 errors: 700 MiB of memory, and seconds.
    alerts: Annotated[tuple[Alert, ...], Field(max_length=MAX_ALERTS), FailFast()]
    group_key: Value = ""
    truncated_alerts: Annotated[int, Field(ge=0, lt=2**64)] = 0
    """How many alerts of the group Alertmanager left out (its `max_alerts`)."""
    receiver: Value = ""
    group_labels: Labels = Field(default_factory=dict)
    common_labels: Labels = Field(default_factory=dict)
    common_annotations: Annotations = Field(default_factory=dict)
    external_url: Value = ""


_SHOWN = {
    *(str(field.alias) for model in (Alert, Payload) for field in model.model_fields.values()),
    *("alertname", "run", "action", "[key]"),
}
"""What may stand in an error's place: our own names, and pydantic's word for a mapping's key."""


def parse(body: bytes | str) -> Payload:
    """Read one delivery.

    Raises:
        PayloadError: it is not JSON, not of this shape, or over a bound.
    """
    try:
        return Payload.model_validate_json(body)
    except ValidationError as error:
        # One is enough to start with, and no input is repeated: a sender may have put its secrets
        # into the wrong place.
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        if first["type"] == "json_invalid":
            raise PayloadError("The body is not valid JSON.", is_json=False) from None
        place = ".".join(
            str(part) if isinstance(part, int) or part in _SHOWN else "*" for part in first["loc"]
        )
        reason = f"{place or 'the body'}: {first['msg'][:MAX_NAME]}"
        raise PayloadError(
            f"The body is not an Alertmanager webhook payload, version 4 ({reason}).", is_json=True
        ) from None


def schema() -> dict[str, Any]:
    """The payload's JSON schema in one piece, for OpenAPI."""
    whole = Payload.model_json_schema()
    alert = whole.pop("$defs")["Alert"]
    whole["properties"]["alerts"]["items"] = alert
    return whole
