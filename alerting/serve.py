"""`act-alerting serve`: the receiver as a process, from its port to its clean end."""

from __future__ import annotations

import logging
import signal
import socket
from types import FrameType

import uvicorn
from prometheus_client import CollectorRegistry

from alerting.exceptions import AlertingError, ConfigError
from alerting.mode import switched_to
from alerting.receiver import create_app
from alerting.settings import Settings
from alerting.store import Store

log = logging.getLogger(__name__)

GRACE_SECONDS = 3
"""How long open connections may finish after SIGTERM; what is cut off is sent again."""


class ListenError(AlertingError):
    """The port cannot be had."""


def serve(settings: Settings) -> None:
    """Take notifications until SIGTERM or SIGINT.

    Raises:
        ConfigError: there is no such address, or the database cannot serve.
        ListenError: the port is in use.
    """
    # Before the database: a second receiver started by mistake fails at the port, its first clash.
    listener = _listen(settings.host, settings.port)
    with listener:
        targets = tuple(target.name for target in settings.notify)
        store = Store(settings.database, targets, settings.repeat_interval_seconds)
        try:
            app = create_app(settings, store, registry=CollectorRegistry())
            server = uvicorn.Server(
                uvicorn.Config(
                    app,
                    lifespan="on",  # without its worker it must not start
                    log_config=None,
                    access_log=False,
                    server_header=False,
                    timeout_graceful_shutdown=GRACE_SECONDS,
                )
            )

            def end(_number: int, _frame: FrameType | None) -> None:
                server.should_exit = True

            # uvicorn's own handlers end it cleanly and then raise the signal again, which would
            # end the process before the database is closed.
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, end)
            host, port = listener.getsockname()[:2]
            log.info("Mode %s.", switched_to(store.read) or settings.mode)
            log.info("Listening on http://%s:%d", f"[{host}]" if ":" in host else host, port)
            if not settings.runs.is_dir():
                log.warning("The runs folder %s does not exist yet.", settings.runs)
            server.run(sockets=[listener])
        finally:
            store.close()
    log.info("Ended.")


def _listen(host: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        # With the protocol: asyncio sets TCP_NODELAY only where it is named, and without that each
        # answer waits 40 ms for the sender's delayed acknowledgement.
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ConfigError(f"{host} is no address to listen on: {error.strerror}.") from error
    # Else a restart fails for a minute while old connections are in TIME_WAIT.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
        listener.listen()
    except OSError as error:
        listener.close()
        raise ListenError(f"Cannot listen on {host}:{port}: {error.strerror}.") from error
    return listener
