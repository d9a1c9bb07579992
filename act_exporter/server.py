"""The HTTP server of `/metrics` and `/`: one daemon thread, one more a request."""

from __future__ import annotations

import gzip
import os
import socket
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import TCPServer
from typing import Any, TypeVar

from act_exporter.access import Access

Metrics = Callable[[str], tuple[bytes, str]]
"""From an Accept header to a body and its content type."""

Page = Callable[[str], bytes]
"""From the query of an address to HTML."""

Rendered = TypeVar("Rendered")

_TEXT = "text/plain; charset=utf-8"

# Numbers of now, for whoever asked and nobody else.
_HEADERS = {
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}

# A scraper that sends nothing is let go after this many seconds, Prometheus' own scrape_timeout,
# and one that sends or reads a byte now and then after a little more.
_REQUEST_SECONDS = 10
_CONNECTION_SECONDS = 15

# Requests at a time, each of which has a thread and a page. Two Prometheus and some people have
# five; what is beyond this is a mistake, and is hung up on.
_CONNECTIONS = 64

# A page of 10,000 series is 1 MB, and a tenth of that after 3 ms without the interpreter's lock.
# Within a machine there is nothing to win, nor for what one packet takes.
_PACKET = 1_400
_GZIP_LEVEL = 1


class MetricsServer:
    """Serves two pages until closed.

    Args:
        host: address to listen on, IPv4 or IPv6.
        port: port; 0 for any free one.
        metrics: renders `/metrics`, in a request's thread and in one at a time.
        page: renders `/`, likewise.
        policy: the content security policy of `/`.
        tick: called twice a second, in the server's thread; must not raise.
        access: who may see them; None for everybody who reaches the port.

    Raises:
        OSError: the address cannot be listened on.
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        metrics: Metrics,
        page: Page,
        policy: str,
        tick: Callable[[], None],
        access: Access | None = None,
    ) -> None:
        self._process = os.getpid()
        self._server = _Server(host, port, metrics, page, policy, tick, access)
        self.port: int = self._server.server_address[1]
        self._thread = threading.Thread(
            target=self._server.serve_forever, name="act-exporter", daemon=True
        )
        self._thread.start()
        _close_in_children(self._server.socket)

    def close(self) -> None:
        """Stop listening; in a forked child there is nothing to stop."""
        if os.getpid() != self._process:
            return
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def _close_in_children(listener: socket.socket) -> None:
    """A DataLoader's forked worker must not hold the port when the trainer is gone."""
    reference = weakref.ref(listener)

    def close() -> None:
        inherited = reference()
        if inherited is not None:
            inherited.close()

    os.register_at_fork(after_in_child=close)


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(
        self,
        host: str,
        port: int,
        metrics: Metrics,
        page: Page,
        policy: str,
        tick: Callable[[], None],
        access: Access | None,
    ) -> None:
        self.metrics, self.page, self.policy, self.access = metrics, page, policy, access
        self._tick = tick
        self._open: dict[socket.socket, float] = {}  # and until when
        self.rendered = _Rendered()
        if ":" in host:
            self.address_family = socket.AF_INET6
        super().__init__((host, port), _Handler)

    def server_bind(self) -> None:
        # Not HTTPServer's own, which asks the resolver for a name that nobody uses.
        TCPServer.server_bind(self)

    # What socketserver calls by these names

    def verify_request(self, request: Any, client_address: Any) -> bool:
        return len(self._open) < _CONNECTIONS

    def process_request(self, request: Any, client_address: Any) -> None:
        self._open[request] = time.monotonic() + _CONNECTION_SECONDS
        super().process_request(request, client_address)

    def finish_request(self, request: Any, client_address: Any) -> None:
        request.settimeout(_REQUEST_SECONDS)
        if self.access is None:
            super().finish_request(request, client_address)
            return
        # In the request's own thread: a client that never ends its handshake holds up nobody.
        # The other socket is a copy, so that the first one can still be hung up.
        with self.access.wrap(request.dup()) as connection:
            super().finish_request(connection, client_address)
            with suppress(OSError):
                connection.shutdown(socket.SHUT_WR)

    def shutdown_request(self, request: Any) -> None:
        self._open.pop(request, None)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        # After each half second of waiting, and after each request.
        now = time.monotonic()
        for request, until in list(self._open.items()):
            if now > until:
                with suppress(OSError):
                    request.shutdown(socket.SHUT_RDWR)  # its thread then finds no more to do
        self._tick()

    def handle_error(self, request: object, client_address: object) -> None:
        """A scraper that hung up is no event of the trainer's."""


class _Rendered:
    """Pages rendered one at a time, each for all who asked for it before it was begun.

    Threads that render at once take the interpreter in turns, and training gets one turn in so
    many. Who asked before a page was begun gets one that is no older than a page of their own.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last: tuple[object, float, Any] = (None, 0.0, None)  # of what, begun when, and it

    def __call__(self, render: Callable[[str], Rendered], asked_for: str) -> Rendered:
        asked = time.monotonic()
        with self._lock:
            last, begun, page = self._last
            if last != (render, asked_for) or begun < asked:
                begun = time.monotonic()
                page = render(asked_for)
                self._last = ((render, asked_for), begun, page)
            found: Rendered = page
            return found


class _Handler(BaseHTTPRequestHandler):
    # One request a connection: a kept one would go on answering for an exporter that was closed.
    protocol_version = "HTTP/1.0"
    timeout = _REQUEST_SECONDS
    server: _Server

    def do_GET(self) -> None:
        self._answer(*self._find())

    def do_HEAD(self) -> None:
        self._answer(*self._find())

    def _find(self) -> tuple[int, bytes, str]:
        """Status, body and content type of what was asked for."""
        access = self.server.access
        if access is not None and not access.allows(self.headers.get("Authorization", "")):
            return 401, b"needs the token, as a bearer's or as a password\n", _TEXT
        path, _, query = self.path.partition("?")
        rendered = self.server.rendered
        try:
            if path == "/metrics":
                return 200, *rendered(self.server.metrics, self.headers.get("Accept", ""))
            if path == "/":
                return 200, rendered(self.server.page, query), "text/html; charset=utf-8"
        except Exception:
            # Counted and logged by whoever renders; here somebody waits for an answer.
            return 500, b"This page could not be made; training goes on. See its log.\n", _TEXT
        return 404, b"not found: see / and /metrics\n", _TEXT

    def _answer(self, status: int, body: bytes, content_type: str) -> None:
        self.send_response(status)
        for name, value in _HEADERS.items():
            self.send_header(name, value)
        # Also on what is no HTML: a policy costs nothing where there is nothing to run.
        self.send_header("Content-Security-Policy", self.server.policy)
        self.send_header("Content-Type", content_type)
        if status == 401:
            self.send_header("WWW-Authenticate", 'Basic realm="act-exporter"')
        if self._pays(len(body)):
            body = gzip.compress(body, _GZIP_LEVEL)
            self.send_header("Content-Encoding", "gzip")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _pays(self, size: int) -> bool:
        """Whether the client takes gzip, and it is worth the time."""
        accepted = self.headers.get("Accept-Encoding", "")
        here = self.connection.getsockname()[0] == self.client_address[0]
        return size > _PACKET and "gzip" in accepted and not here

    def log_message(self, *args: object) -> None:
        """Scrapes are not worth a line each in the trainer's log."""
