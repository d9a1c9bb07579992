"""The vendors' bots as local HTTP servers: they check what the vendors document that they check.

The checks are written from the vendors' words and share no code with what they check.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import hmac
import json
import ssl
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

KEY = "key-0123456789abcdef"
"""In each bot's address, where the vendors have theirs."""
SECRET = "SECabc"


@dataclass
class Bot:
    """A server on loopback; `answers` are given first, each once, then its own judgement.

    An answer is (status, headers, body); the body "hang" says nothing until the bot is closed and
    then hangs up, "late" says yes then, and "cut" hangs up at once. `posts` has what came, `taken`
    what it said yes to.
    """

    answers: list[tuple[int, dict[str, str], bytes | str]] = field(default_factory=list)
    posts: list[dict[str, Any]] = field(default_factory=list)
    taken: list[dict[str, Any]] = field(default_factory=list)
    keyword: str = ""
    port: int = 0
    hook: str = f"/hook/{KEY}"
    tls: ssl.SSLContext | None = None
    closed: threading.Event = field(default_factory=threading.Event)

    @property
    def url(self) -> str:
        return f"http{'s' if self.tls else ''}://127.0.0.1:{self.port}{self.hook}"

    def judge(self, target: str, body: bytes, headers: Any) -> dict[str, Any]:
        return {}

    def texts(self) -> list[str]:
        """What the group sees, one string a message."""
        return [json.dumps(content, ensure_ascii=False) for content in self.taken]

    @contextlib.contextmanager
    def serving(self) -> Iterator[Any]:
        bot = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                post = {"path": self.path, "size": len(body), "headers": dict(self.headers)}
                status, headers, said = 200, {}, b""
                if bot.answers:
                    status, headers, said = bot.answers.pop(0)
                else:
                    verdict = bot.judge(self.path, body, self.headers)
                    status = verdict.pop("http", 200)
                    said = json.dumps(verdict).encode()
                    if status == 200 and not any(verdict.get(k) for k in ("code", "errcode")):
                        bot.taken.append(json.loads(body))
                bot.posts.append(post | {"body": json.loads(body)})
                if said in ("hang", "late"):
                    bot.closed.wait(60)
                if said == "late":
                    said = b""
                if isinstance(said, str):
                    self.close_connection = True
                    return
                self.send_response(status)
                for name, value in ({"Content-Length": str(len(said))} | headers).items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(said)

            def log_message(self, *args: Any) -> None:
                pass

        with ThreadingHTTPServer(("127.0.0.1", self.port), Handler) as server:
            server.daemon_threads = True
            server.handle_error = lambda *_: None  # type: ignore[method-assign]
            if self.tls is not None:
                server.socket = self.tls.wrap_socket(server.socket, server_side=True)
            self.port = server.server_port
            thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
            thread.start()
            try:
                yield self
            finally:
                self.closed.set()
                server.shutdown()
                thread.join()


@dataclass
class FeishuBot(Bot):
    secret: str | None = SECRET
    hook: str = f"/open-apis/bot/v2/hook/{KEY}"

    def judge(self, target: str, body: bytes, headers: Any) -> dict[str, Any]:
        content = json.loads(body)
        if target != self.hook:
            return {"http": 400, "code": 19001, "msg": "param invalid: incoming webhook access"}
        if len(body) > 20 * 1024:
            return {"http": 400, "code": 9499, "msg": "Bad Request"}
        if self.secret is not None:
            when = content.get("timestamp", "")
            key = f"{when}\n{self.secret}".encode()
            right = base64.b64encode(hmac.digest(key, b"", hashlib.sha256)).decode()
            fresh = when.isdecimal() and abs(time.time() - int(when)) < 3600
            if not fresh or content.get("sign") != right:
                return {
                    "code": 19021,
                    "msg": "sign match fail or timestamp is not within one hour from current time",
                }
        if content.get("msg_type") != "post":
            return {"code": 9499, "msg": "Bad Request"}
        (language,) = content["content"]["post"].values()
        text = language["title"] + json.dumps(language["content"], ensure_ascii=False)
        if self.keyword not in text:
            return {"code": 19024, "msg": "Key Words Not Found"}
        return {"code": 0, "msg": "success", "data": {}, "StatusCode": 0}


@dataclass
class DingTalkBot(Bot):
    secret: str | None = SECRET
    hook: str = f"/robot/send?access_token={KEY}"

    def judge(self, target: str, body: bytes, headers: Any) -> dict[str, Any]:
        query = {name: values[0] for name, values in parse_qs(urlsplit(target).query).items()}
        content = json.loads(body)
        if query.get("access_token") != KEY:
            return {"errcode": 300005, "errmsg": "token is not exist"}
        if len(body) > 20_000:
            return {"errcode": 460101, "errmsg": "message too long, exceed 20000 bytes"}
        if self.secret is not None:
            when = query.get("timestamp", "")
            if not when.isdecimal() or abs(time.time() * 1000 - int(when)) > 3_600_000:
                return {"errcode": 310000, "errmsg": "description:invalid timestamp"}
            right = hmac.digest(
                self.secret.encode(), f"{when}\n{self.secret}".encode(), hashlib.sha256
            )
            if query.get("sign") != base64.b64encode(right).decode():
                return {
                    "errcode": 310000,
                    "errmsg": "description:机器人发送签名不匹配;solution:请确认时间戳",
                }
        text = content["markdown"]["title"] + content["markdown"]["text"]
        if self.keyword not in text:
            return {"errcode": 310000, "errmsg": "description:关键词不匹配"}
        return {"errcode": 0, "errmsg": "ok"}


@dataclass
class WeComBot(Bot):
    hook: str = f"/cgi-bin/webhook/send?key={KEY}"

    def judge(self, target: str, body: bytes, headers: Any) -> dict[str, Any]:
        if target != self.hook:
            return {"errcode": 93000, "errmsg": "invalid webhook url"}
        if len(json.loads(body)["markdown"]["content"].encode()) > 4096:
            return {"errcode": 40058, "errmsg": "markdown.content exceed max length 4096"}
        return {"errcode": 0, "errmsg": "ok"}


@dataclass
class Endpoint(Bot):
    """For the generic webhook: wants a token."""

    token: str = "endpoint-token"

    def judge(self, target: str, body: bytes, headers: Any) -> dict[str, Any]:
        return {} if headers["Authorization"] == f"Bearer {self.token}" else {"http": 401}
