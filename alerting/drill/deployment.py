"""What must be there before a drill's alert is sent: a live run, and a receiver that is ready."""

from __future__ import annotations

import time
from pathlib import Path
from urllib.parse import quote

import requests

from alerting.control import LIVE, ControlDirectory, Status
from alerting.drill.report import Report
from alerting.exceptions import ControlError
from alerting.settings import Settings

ANSWER_SECONDS = 10.0
"""`/readyz` waits up to 5 s for the disk."""


def find_live_run(runs: Path, run: str, report: Report) -> ControlDirectory | None:
    """The run's control directory, or None where nobody would answer."""
    try:
        control = ControlDirectory.find(runs, run)
        status = control.status() if control is not None else None
    except ControlError as error:
        report.fail("run", str(error))
        return None
    if status is None:
        found = (s.run for _, s in ControlDirectory.registered(runs) if isinstance(s, Status))
        names = ", ".join(sorted(found)) or "none"
        report.fail("run", f"no guard has registered {run!r} in {runs}; there are: {names}")
        return None
    age = time.time() - status.updated_at
    words = f"{run!r} is {status.state} at step {status.step}, as its guard said {age:.0f} s ago"
    if status.state not in LIVE:
        report.fail("run", f"{words}: nobody would answer")
        return None
    report.tell("ok", "run", words)
    return control


def receiver_answers(settings: Settings, run: str, report: Report) -> bool:
    """Whether something answers at the receiver's address; says whether it is ready."""
    # Where it listens on all addresses, it answers at this one.
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(settings.host, settings.host)  # noqa: S104
    url = f"http://{f'[{host}]' if ':' in host else host}:{settings.port}"
    headers = {"Authorization": f"Bearer {settings.token}"}
    with requests.Session() as session:
        # Else a proxy of the environment would get the token.
        session.trust_env = False

        def get(path: str) -> requests.Response:
            return session.get(
                url + path, headers=headers, timeout=ANSWER_SECONDS, allow_redirects=False
            )

        try:
            ready, known = get("/readyz"), get(f"/runs/{quote(run, safe='')}")
        except requests.RequestException as error:
            report.fail(
                "receiver",
                f"it does not answer at {url} ({type(error).__name__}): start it with "
                "`act-alerting serve`",
            )
            return False
    if not ready.ok:
        report.fail("receiver", f"it is not ready: HTTP {ready.status_code}, {ready.text[:300]}")
    elif known.status_code == 401:
        report.fail(
            "receiver",
            "it refuses the token of token_file: it read the file when it started, so restart it",
        )
    elif not known.ok:
        report.fail("receiver", f"it does not tell of the run: {known.text[:300]}")
    else:
        only = known.json().get("mode") == "notify-only"
        note = "; in mode notify-only, so a real alert would ask no trainer" if only else ""
        report.tell("ok", "receiver", f"{url} is ready and takes the token{note}")
    return True
