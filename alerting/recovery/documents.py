"""The guard's JSON files, read with care: each value is checked before anything is built on it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, TypeVar

from alerting.exceptions import CheckpointError

Value = TypeVar("Value")


class Document:
    """One JSON object from a file, whose fields are asked for by name and type."""

    def __init__(self, path: Path, content: dict[str, Any]) -> None:
        self.path = path
        self._content = content

    @classmethod
    def read(cls, path: Path) -> Document:
        """The object in `path`.

        Raises:
            FileNotFoundError: there is no such file.
            CheckpointError: it cannot be read or holds no JSON object.
        """
        try:
            content = json.loads(path.read_bytes())
        except FileNotFoundError:
            raise
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from error
        if not isinstance(content, dict):
            raise CheckpointError(f"{path} holds no JSON object")
        return cls(path, content)

    def get(self, name: str, kind: type[Value]) -> Value:
        """The field `name`, which must be a `kind`.

        Raises:
            CheckpointError: it is missing or something else.
        """
        value = self._content.get(name)
        # bool is an int to isinstance, and JSON writes a whole float as an int.
        if kind is float and type(value) is int:
            value = float(value)
        if not isinstance(value, kind) or (kind is not bool and isinstance(value, bool)):
            raise CheckpointError(f"{self.path}: {name!r} is {value!r}, expected {kind.__name__}")
        return value

    def optional(self, name: str, kind: type[Value]) -> Value | None:
        """The field `name`, or None where it is null or missing."""
        return None if self._content.get(name) is None else self.get(name, kind)

    def choice(self, name: str, choices: tuple[str, ...]) -> str:
        """The field `name`, which must be one of `choices`."""
        value = self.get(name, str)
        if value not in choices:
            raise CheckpointError(f"{self.path}: {name!r} is {value!r}, expected one of {choices}")
        return value

    def names(self, name: str) -> tuple[str, ...]:
        """The field `name`, a list of strings."""
        values = self.get(name, list)
        if not all(isinstance(value, str) for value in values):
            raise CheckpointError(f"{self.path}: {name!r} is {values!r}, expected strings")
        return tuple(values)

    def part(self, name: str) -> Document:
        """The object in the field `name`."""
        return Document(self.path, self.get(name, dict))

    def parts(self, name: str) -> list[Document]:
        """The objects in the list in the field `name`; none where it is null or missing."""
        values = self.optional(name, list) or []
        if not all(isinstance(value, dict) for value in values):
            raise CheckpointError(f"{self.path}: {name!r} is {values!r}, expected objects")
        return [Document(self.path, value) for value in values]

    def require_format(self, name: str, version: int) -> None:
        """Refuse a file that another program, or another version of this one, wrote.

        Raises:
            CheckpointError: its format or version differs.
        """
        found = self._content.get("format"), self._content.get("version")
        if found != (name, version):
            raise CheckpointError(
                f"{self.path} has format {found[0]!r} version {found[1]!r}; "
                f"this guard reads only {name!r} version {version}"
            )

    def keys(self) -> list[str]:
        """The fields' names."""
        return list(self._content)
