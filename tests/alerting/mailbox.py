"""A mail server on loopback."""

from __future__ import annotations

import contextlib
import email
import email.policy
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from aiosmtpd.controller import Controller
from aiosmtpd.smtp import AuthResult, Envelope, LoginPassword

from deploy.demo.servers import free_port

MAIL_SECRET = "mail-secret"


@dataclass
class Mailbox:
    """An SMTP server on loopback that asks for a login and remembers."""

    logins: list[tuple[str, str]] = field(default_factory=list)
    mails: list[email.message.EmailMessage] = field(default_factory=list)
    port: int = field(default_factory=free_port)

    async def handle_DATA(self, server: Any, session: Any, envelope: Envelope) -> str:  # noqa: N802
        if not session.authenticated:
            return "530 5.7.0 Authentication required"
        content = envelope.content
        assert isinstance(content, bytes)
        self.mails.append(email.message_from_bytes(content, policy=email.policy.default))  # type: ignore[arg-type]
        return "250 OK"

    def authenticate(
        self, server: Any, session: Any, envelope: Any, mechanism: str, data: Any
    ) -> AuthResult:
        assert isinstance(data, LoginPassword)
        self.logins.append((data.login.decode(), data.password.decode()))
        return AuthResult(success=data.password.decode() == MAIL_SECRET)

    @contextlib.contextmanager
    def serving(self) -> Iterator[Mailbox]:
        controller = Controller(
            self,
            hostname="127.0.0.1",
            port=self.port,
            authenticator=self.authenticate,
            auth_require_tls=False,
            # aiosmtpd words the prompts of LOGIN as Alertmanager does not expect them.
            auth_exclude_mechanism=["LOGIN"],
        )
        controller.start()
        try:
            yield self
        finally:
            controller.stop()
