"""The HTTP server of `/metrics`: one daemon thread, one more a scrape, nothing of the trainer's."""

from __future__ import annotations

import os
import socket
import threading
import weakref
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import TCPServer

Page = Callable[[str], tuple[bytes, str]]
"""From an Accept header to a body and its content type."""

# A scraper that sends nothing is let go after this many seconds, Prometheus' own scrape_timeout.
_REQUEST_SECONDS = 10


class MetricsServer:
    """Serves one page until closed.

    Args:
        host: address to listen on, IPv4 or IPv6.
        port: port; 0 for any free one.
        page: renders the page, in the scrape's thread.

    Raises:
        OSError: the address cannot be listened on.
    """

    def __init__(self, host: str, port: int, page: Page) -> None:
        self._process = os.getpid()
        self._server = _Server(host, port, page)
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

    def __init__(self, host: str, port: int, page: Page) -> None:
        self.page = page
        if ":" in host:
            self.address_family = socket.AF_INET6
        super().__init__((host, port), _Handler)

    def server_bind(self) -> None:
        # Not HTTPServer's own, which asks the resolver for a name that nobody uses.
        TCPServer.server_bind(self)

    def handle_error(self, request: object, client_address: object) -> None:
        """A scraper that hung up is no event of the trainer's."""


class _Handler(BaseHTTPRequestHandler):
    # One request a connection: a kept one would go on answering for an exporter that was closed.
    protocol_version = "HTTP/1.0"
    timeout = _REQUEST_SECONDS
    server: _Server

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path == "/metrics":
            body, content_type = self.server.page(self.headers.get("Accept", ""))
            self._answer(200, body, content_type)
        elif path == "/":
            self._answer(200, b"act-exporter: see /metrics\n", "text/plain; charset=utf-8")
        else:
            self._answer(404, b"not found: see /metrics\n", "text/plain; charset=utf-8")

    def _answer(self, status: int, body: bytes, content_type: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        """Scrapes are not worth a line each in the trainer's log."""
