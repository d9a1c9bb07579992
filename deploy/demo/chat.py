"""A stand-in of a chat tool's incoming webhook: appends each message to a file.

python -m deploy.demo.chat PORT FILE
"""

from __future__ import annotations

import json
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


def serve(port: int, file: Path) -> None:
    """Serve on 127.0.0.1 until ended; each line of `file` is {"at": Unix seconds, "body": ...}."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with file.open("a", encoding="utf-8") as lines:
                lines.write(json.dumps({"at": time.time(), "body": body}) + "\n")
            self.send_response(200)
            self.send_header("Content-Length", "2")
            self.end_headers()
            self.wfile.write(b"ok")

        def log_message(self, *args: object) -> None:
            pass

    ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()


if __name__ == "__main__":
    serve(int(sys.argv[1]), Path(sys.argv[2]))
