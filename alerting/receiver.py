"""The webhook receiver's HTTP side: what Alertmanager posts is recorded, and only then acted upon.

The order of `POST /alerts`: token, size, shape, record on the disk, answer, wake the worker.
`POST /messages`, for people, and `POST /watchdog` have the same order; the messenger and the worker
find what is recorded by themselves.
Each refusal is one sentence; none repeats the token or the input. Alertmanager sends a notification
again for ever after a 5xx, so that is answered only when recording failed.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import os
import time
from collections.abc import AsyncIterator, Callable, Iterable
from concurrent.futures import Future
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from fastapi import Depends, FastAPI, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from starlette.background import BackgroundTask
from starlette.requests import ClientDisconnect

from alerting.control import LIVE, ControlDirectory
from alerting.exceptions import ControlError
from alerting.messenger import Messenger
from alerting.metrics import Metrics, WithoutCreated
from alerting.mode import switched_to
from alerting.outbox import news_of_group
from alerting.overview import find_run
from alerting.payload import Payload, PayloadError, parse, schema
from alerting.settings import Settings
from alerting.store import Store, StoreError
from alerting.watchdog import ALERTNAME, is_watchdog
from alerting.worker import Worker

log = logging.getLogger(__name__)

MAX_BODY_BYTES = 1 << 20
"""1 MiB: 1,000 alerts are 302 kB."""
BODY_SECONDS = 10.0
"""A sender that stops in the middle of its body is told so; Alertmanager sends at once."""
READY_SECONDS = 5.0
"""Longest wait for the database in `/readyz`; probes usually give up after 1 to 10 seconds."""

_REFUSALS = {
    400: "The body is not JSON, or broke off.",
    401: "The bearer token is missing or wrong.",
    408: "The body took too long.",
    413: "The body is too large.",
    422: "The body is no notification, or nobody is told.",
    503: "It could not be recorded; send it again.",
}
_SENTENCE = {
    "application/json": {
        "schema": {
            "type": "object",
            "properties": {"detail": {"type": "string"}},
            "required": ["detail"],
        }
    }
}


def _responses(codes: Iterable[int]) -> dict[int | str, dict[str, Any]]:
    """For OpenAPI: each of these is one sentence."""
    return {code: {"description": _REFUSALS[code], "content": _SENTENCE} for code in codes}


RUN_ANSWERS: dict[int | str, dict[str, Any]] = {
    401: {"description": "The token is missing or wrong."},
    404: {"description": "No guard has registered such a run."},
    409: {"description": "Two run folders are live under this name."},
    503: {"description": "The database could not be read just now."},
}


class _RejectedError(Exception):
    """The request ends here, with this HTTP status and sentence."""

    def __init__(self, code: int, sentence: str) -> None:
        super().__init__(sentence)
        self.code = code


def create_app(
    settings: Settings,
    store: Store,
    *,
    registry: CollectorRegistry,
    clock: Callable[[], float] = time.time,
) -> FastAPI:
    """The receiver as an ASGI application; its worker runs while the application does.

    Args:
        settings: checked settings.
        store: open; the caller closes it after the application has ended.
        registry: the receiver's own metrics are registered there and served at `/metrics`.
        clock: Unix seconds.
    """
    metrics = Metrics(registry, [target.name for target in settings.notify])
    worker = Worker(settings, store, metrics, clock)
    messenger = Messenger(settings, store.outbox, metrics, clock)
    body_schema = {
        "requestBody": {"required": True, "content": {"application/json": {"schema": schema()}}}
    }

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        worker.start()
        messenger.start()
        try:
            yield
        finally:
            await asyncio.to_thread(worker.stop)
            await asyncio.to_thread(messenger.stop)

    app = FastAPI(title="act-alerting", docs_url=None, redoc_url=None, lifespan=lifespan)
    bearer = HTTPBearer(auto_error=False, description="The content of the receiver's token file.")

    def answer(
        code: int, content: dict[str, object], task: BackgroundTask | None = None
    ) -> Response:
        metrics.deliveries.labels(str(code)).inc()
        headers = {"WWW-Authenticate": "Bearer"} if code == 401 else None
        return JSONResponse(content, code, headers, background=task)

    async def take(
        request: Request,
        credentials: HTTPAuthorizationCredentials | None,
        record: Callable[[Payload, str], tuple[str, Future[int]]],
        task: BackgroundTask | None = None,
    ) -> Response:
        """Record one notification, durably, and then acknowledge it by its id."""
        try:
            _check_token(credentials, settings.token)
            body = await _read_body(request)
            payload = _parse(body)
            name, recorded = record(payload, body.decode("utf-8"))
            identifier = await asyncio.wrap_future(recorded)
        except _RejectedError as error:
            log.warning("A notification was rejected with %d: %s", error.code, error)
            return answer(error.code, {"detail": str(error)})
        except StoreError as error:
            log.error("A notification could not be recorded: %s", error)  # noqa: TRY400
            return answer(503, {"detail": "The notification could not be recorded; try again."})
        # People's copy of the same alerts is not counted a second time.
        if name == "delivery":
            for alert in payload.alerts:
                metrics.alerts.labels(alert.status).inc()
        if payload.truncated_alerts:
            log.warning(
                "%s %d: Alertmanager left out %d alerts of the group.",
                name.capitalize(),
                identifier,
                payload.truncated_alerts,
            )
        # A background task runs when the answer has been sent.
        return answer(202, {name: identifier}, task)

    @app.post(
        "/alerts",
        status_code=202,
        response_model=None,
        responses=_responses(_REFUSALS),
        openapi_extra=body_schema,
    )
    async def alerts(
        request: Request, credentials: HTTPAuthorizationCredentials | None = Depends(bearer)
    ) -> Response:
        """Take one Alertmanager notification (webhook payload, version 4) for the trainers."""

        def record(_payload: Payload, body: str) -> tuple[str, Future[int]]:
            return "delivery", store.add_delivery(body, clock())

        return await take(request, credentials, record, BackgroundTask(worker.wake))

    @app.post(
        "/messages",
        status_code=202,
        response_model=None,
        responses=_responses(_REFUSALS),
        openapi_extra=body_schema,
    )
    async def messages(
        request: Request, credentials: HTTPAuthorizationCredentials | None = Depends(bearer)
    ) -> Response:
        """Take one Alertmanager notification (webhook payload, version 4) for people."""

        def record(payload: Payload, body: str) -> tuple[str, Future[int]]:
            if not settings.notify:
                # Not 202: Alertmanager would count as told what nobody reads.
                raise _RejectedError(422, "Nobody is listed in the receiver's `notify:`.")
            return "message", store.outbox.add(news_of_group(payload, body, clock()))

        return await take(request, credentials, record)

    @app.post("/watchdog", status_code=202, response_model=None, openapi_extra=body_schema)
    async def watchdog(
        request: Request, credentials: HTTPAuthorizationCredentials | None = Depends(bearer)
    ) -> Response:
        """Take the watchdog (webhook payload, version 4), which says that alerts get through."""

        def record(payload: Payload, _body: str) -> tuple[str, Future[int]]:
            if not is_watchdog(payload):
                raise _RejectedError(422, f"No firing {ALERTNAME} is among these alerts.")
            return "watchdog", store.beats.add(clock())

        return await take(request, credentials, record)

    # A path, for a run's name may hold slashes; it is compared and never becomes one.
    @app.get("/runs/{run:path}", response_model=None, responses=RUN_ANSWERS)
    async def one_run(
        run: str, credentials: HTTPAuthorizationCredentials | None = Depends(bearer)
    ) -> Response:
        """A run: what its guard publishes, what was decided and answered, and its messages."""
        try:
            _check_token(credentials, settings.token)
            found = await asyncio.to_thread(find_run, settings.runs, run, store.read, clock())
            mode = switched_to(store.read) or settings.mode
        except _RejectedError as error:
            return JSONResponse({"detail": str(error)}, 401, {"WWW-Authenticate": "Bearer"})
        except ControlError as error:
            return JSONResponse({"detail": f"{error}."}, 409)
        except StoreError as error:
            return JSONResponse({"detail": str(error)}, 503)
        if found is None:
            return JSONResponse({"detail": "No guard has registered a run of this name."}, 404)
        return JSONResponse({**found.to_json(), "mode": mode})

    @app.get("/healthz")
    async def healthz() -> dict[str, str]:
        """The process is alive."""
        return {"status": "ok"}

    @app.get("/readyz", response_model=None, responses=_responses([503]))
    async def readyz() -> Response:
        """A notification would be recorded and acted upon; 503 with the reason otherwise."""
        problem = await _problem(settings.runs, store, worker, messenger)
        if problem is not None:
            return JSONResponse({"detail": problem}, 503)
        return JSONResponse({"status": "ready"})

    @app.get("/metrics", response_model=None, response_class=PlainTextResponse)
    async def own_metrics() -> Response:
        """The receiver's own metrics."""
        page = generate_latest(WithoutCreated(registry))
        return Response(page, media_type=CONTENT_TYPE_LATEST)

    return app


def _check_token(credentials: HTTPAuthorizationCredentials | None, token: str) -> None:
    # Header bytes arrive decoded as latin-1; compared as bytes, in constant time.
    sent = credentials.credentials.encode("latin-1") if credentials is not None else b""
    if not hmac.compare_digest(sent, token.encode("ascii")):
        raise _RejectedError(
            401,
            "A valid `Authorization: Bearer` token is needed (Alertmanager's credentials_file).",
        )


async def _read_body(request: Request) -> bytes:
    too_large = _RejectedError(413, f"The body is larger than {MAX_BODY_BYTES} bytes.")
    if int(request.headers.get("content-length", "0")) > MAX_BODY_BYTES:
        raise too_large
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for chunk in request.stream():
                body += chunk
                if len(body) > MAX_BODY_BYTES:
                    raise too_large
    except TimeoutError:
        raise _RejectedError(408, f"The body took longer than {BODY_SECONDS:g} s.") from None
    except ClientDisconnect:
        raise _RejectedError(400, "The sender went away in the middle of the body.") from None
    return bytes(body)


def _parse(body: bytes) -> Payload:
    try:
        return parse(body)
    except PayloadError as error:
        raise _RejectedError(422 if error.is_json else 400, str(error)) from None


async def _problem(runs: Path, store: Store, worker: Worker, messenger: Messenger) -> str | None:
    if not worker.is_alive():
        return "The worker has ended."
    if not messenger.is_alive():
        return "The messenger has ended."
    try:
        await asyncio.wait_for(asyncio.wrap_future(store.check_writable()), READY_SECONDS)
    except StoreError as error:
        return str(error)
    except TimeoutError:
        return f"The database took longer than {READY_SECONDS:g} s to write."
    try:
        await asyncio.to_thread(os.listdir, runs)
    except OSError as error:
        return f"The runs folder {runs} cannot be read: {error.strerror}."
    return await asyncio.to_thread(_closed_run, runs)


def _closed_run(runs: Path) -> str | None:
    """Which run could not be asked for anything, if there is one; most often another user's.

    Those that have ended are not asked, so their folders may be closed.
    """
    for control, status in ControlDirectory.registered(runs):
        if isinstance(status, ControlError) or status.state not in LIVE:
            continue
        if not control.accepts_requests():
            return (
                f"Run {status.run!r} cannot be asked: this process may not write requests into "
                f"{control.path}."
            )
    return None
