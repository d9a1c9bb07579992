"""The user's own `module:function`, by which commands come to a model."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from act_exporter.exceptions import SettingError, one_line


def find_function(target: str) -> Callable[..., Any]:
    """The function that is meant by `module:function`, in a module that can be imported from here.

    Raises:
        SettingError: there is none.
    """
    module_name, colon, function_name = target.partition(":")
    if not (module_name and colon and function_name):
        raise SettingError(
            f"{target!r} is not of the form module:function, such as train:build_model"
        )
    # A console script finds its own folder there, not the user's.
    sys.path.insert(0, str(Path.cwd()))
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        # The user's module may be there and miss another.
        missing = error.name is not None and f"{module_name}.".startswith(f"{error.name}.")
        raise SettingError(
            f"no module {error.name!r} can be imported from {Path.cwd()}"
            if missing
            else f"importing {module_name!r} failed: {one_line(error)}"
        ) from error
    except Exception as error:
        raise SettingError(f"importing {module_name!r} failed: {one_line(error)}") from error
    function = getattr(module, function_name, None)
    if not callable(function):
        raise SettingError(f"module {module_name!r} has no function {function_name!r}")
    return function  # type: ignore[no-any-return]


def call(target: str, function: Callable[..., Any], **arguments: Any) -> Any:
    """What the user's function returns.

    Args:
        target: its name, as typed.
        function: itself.
        arguments: its own.

    Raises:
        SettingError: it raised something.
    """
    try:
        return function(**arguments)
    except Exception as error:
        raise SettingError(f"{target} failed: {one_line(error)}") from error
