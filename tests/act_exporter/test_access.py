"""TLS, client certificates and tokens of the exporter's pages, and clients that behave badly."""

from __future__ import annotations

import gzip
import http.client
import re
import socket
import ssl
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
import requests
import trustme
from torch import nn

from act_exporter import server, start_exporter
from act_exporter.exceptions import SettingError
from act_exporter.exporter import Exporter
from deploy.demo.servers import wait_for

TOKEN = "correct horse"


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@contextmanager
def exporter(web_config: Path | None = None, **options) -> Iterator[Exporter]:
    with start_exporter(nn.Linear(2, 2), 0, watch="all", web_config=web_config, **options) as it:
        yield it


def write_certificate(folder: Path, authority: trustme.CA) -> None:
    issued = authority.issue_cert("localhost", "127.0.0.1")
    issued.private_key_pem.write_to_path(folder / "server.key")
    issued.cert_chain_pems[0].write_to_path(folder / "server.crt")


def tls_config(folder: Path, authority: trustme.CA, more: str = "") -> Path:
    write_certificate(folder, authority)
    authority.cert_pem.write_to_path(folder / "ca.crt")
    path = folder / "web.yml"
    path.write_text(f"tls_server_config:\n  cert_file: server.crt\n  key_file: server.key\n{more}")
    return path


def token_config(folder: Path) -> Path:
    (folder / "token").write_text(f"{TOKEN}\n")
    (folder / "web.yml").write_text("bearer_token_file: token\n")
    return folder / "web.yml"


def get(it: Exporter, **options) -> requests.Response:
    scheme = "https" if "verify" in options else "http"
    return requests.get(f"{scheme}://localhost:{it.port}/metrics", timeout=30, **options)


class TestTLS:
    def test_the_page_is_served_to_who_trusts_the_authority(self, tmp_path, authority):
        with exporter(tls_config(tmp_path, authority)) as it:
            assert "act_step" in get(it, verify=tmp_path / "ca.crt").text

    def test_not_without_tls(self, tmp_path, authority):
        with exporter(tls_config(tmp_path, authority)) as it:
            with pytest.raises(requests.ConnectionError):
                get(it)
            assert get(it, verify=tmp_path / "ca.crt").ok

    def test_a_renewed_certificate_is_taken_up(self, tmp_path, authority):
        other = trustme.CA()
        other.cert_pem.write_to_path(tmp_path / "other.crt")
        with exporter(tls_config(tmp_path, authority)) as it:
            assert get(it, verify=tmp_path / "ca.crt").ok
            write_certificate(tmp_path, other)
            assert get(it, verify=tmp_path / "other.crt").ok

    def test_one_that_cannot_be_read_leaves_the_former_in_force(self, tmp_path, authority, caplog):
        with exporter(tls_config(tmp_path, authority)) as it:
            (tmp_path / "server.crt").write_text("half of a cert")
            assert get(it, verify=tmp_path / "ca.crt").ok
        assert "stays in force" in caplog.text

    def test_clients_that_never_end_their_handshake_hold_up_nobody(self, tmp_path, authority):
        with exporter(tls_config(tmp_path, authority)) as it:
            hanging = [socket.create_connection(("127.0.0.1", it.port)) for _ in range(5)]
            assert get(it, verify=tmp_path / "ca.crt").ok
            for connection in hanging:
                connection.close()


class TestClientCertificates:
    @pytest.fixture
    def config(self, tmp_path, authority) -> Path:
        issued = authority.issue_cert("prometheus")
        issued.private_key_and_cert_chain_pem.write_to_path(tmp_path / "client.pem")
        trustme.CA().issue_cert("stranger").private_key_and_cert_chain_pem.write_to_path(
            tmp_path / "stranger.pem"
        )
        return tls_config(
            tmp_path,
            authority,
            "  client_ca_file: ca.crt\n  client_auth_type: RequireAndVerifyClientCert\n",
        )

    def test_one_of_the_authority_is_let_in(self, config, tmp_path):
        with exporter(config) as it:
            assert get(it, verify=tmp_path / "ca.crt", cert=str(tmp_path / "client.pem")).ok

    @pytest.mark.parametrize("cert", [None, "stranger.pem"])
    def test_others_are_not(self, config, tmp_path, cert):
        cert = None if cert is None else str(tmp_path / cert)
        with exporter(config) as it, pytest.raises(requests.ConnectionError):
            get(it, verify=tmp_path / "ca.crt", cert=cert)


class TestToken:
    @pytest.mark.parametrize("path", ["/", "/metrics", "/other"])
    def test_nothing_is_told_without_it(self, tmp_path, path):
        with exporter(token_config(tmp_path)) as it:
            answer = requests.get(f"http://127.0.0.1:{it.port}{path}", timeout=30)
        assert answer.status_code == 401
        assert "Basic" in answer.headers["WWW-Authenticate"]
        assert "act_step" not in answer.text

    def test_as_a_bearers_token(self, tmp_path):
        with exporter(token_config(tmp_path)) as it:
            assert get(it, headers={"Authorization": f"Bearer {TOKEN}"}).ok

    def test_as_a_password_of_any_user(self, tmp_path):
        with exporter(token_config(tmp_path)) as it:
            assert get(it, auth=("anybody", TOKEN)).ok

    @pytest.mark.parametrize(
        "wrong",
        [
            "",
            "Bearer",
            "Bearer ",
            f"Bearer {TOKEN}x",
            f"Digest {TOKEN}",
            TOKEN,
            "Basic ?",
            "Basic eA==",
        ],
    )
    def test_not_with_a_wrong_one(self, tmp_path, wrong):
        with exporter(token_config(tmp_path)) as it:
            assert get(it, headers={"Authorization": wrong}).status_code == 401

    def test_a_new_one_replaces_it(self, tmp_path):
        with exporter(token_config(tmp_path)) as it:
            (tmp_path / "token").write_text("another")
            assert get(it, headers={"Authorization": f"Bearer {TOKEN}"}).status_code == 401
            assert get(it, headers={"Authorization": "Bearer another"}).ok


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "expected some of"),
        ("[", "no YAML"),
        ("bearer_token_file: nowhere", "nowhere: No such file"),
        ("bearer_token_file: empty", "the token is empty"),
        ("bearer_token_file: 3", "no file's name"),
        ("bearer_tokn_file: token", "'bearer_tokn_file' is none of"),
        ("basic_auth_users: {a: b}", "bearer_token_file is taken as a password"),
        ("tls_server_config: {cert_file: token}", "has no key_file"),
        ("tls_server_config: {cert_file: token, key_file: token}", "token: "),
        (
            "tls_server_config: {cert_file: token, key_file: token, client_ca_file: token,"
            " client_auth_type: NoClientCert}",
            "RequireAndVerifyClientCert with a client_ca_file",
        ),
        (
            "tls_server_config: {cert_file: token, key_file: token, min_version: TLS10}",
            "min_version 'TLS10'",
        ),
    ],
)
def test_a_config_that_cannot_serve_is_refused_in_words(tmp_path, content, said):
    (tmp_path / "token").write_text(TOKEN)
    (tmp_path / "empty").write_text("\n")
    (tmp_path / "web.yml").write_text(content)
    with pytest.raises(SettingError, match=re.escape(said)):
        start_exporter(nn.Linear(2, 2), 0, watch="all", web_config=tmp_path / "web.yml")


class TestClientsThatBehaveBadly:
    def test_one_that_sends_a_byte_now_and_then_is_hung_up_on(self, monkeypatch):
        monkeypatch.setattr(server, "_CONNECTION_SECONDS", 0.5)
        with exporter() as it, socket.create_connection(("127.0.0.1", it.port)) as slow:
            slow.settimeout(0.1)

            def hung_up() -> bool:
                try:
                    slow.sendall(b"G")
                    return slow.recv(1) == b""
                except TimeoutError:
                    return False
                except OSError:
                    return True

            wait_for(hung_up, "the end of the connection")

    def test_so_many_that_there_is_no_room_leave_it_again(self, monkeypatch):
        monkeypatch.setattr(server, "_CONNECTION_SECONDS", 1.0)
        monkeypatch.setattr(server, "_CONNECTIONS", 8)
        with exporter() as it:
            crowd = [socket.create_connection(("127.0.0.1", it.port)) for _ in range(20)]

            wait_for(lambda: get(it).ok, "an answer")
            for connection in crowd:
                connection.close()

    def test_many_at_once_share_pages_that_are_rendered_one_at_a_time(self):
        """Or they would take the interpreter from the training thread in as many turns."""
        begun, begin, busy = [], threading.Event(), threading.Lock()

        def render(accept: str) -> tuple[bytes, str]:
            assert busy.acquire(blocking=False)  # or the page is a 500
            begun.append(accept)
            number = len(begun)
            begin.wait(60)
            busy.release()
            return b"%d" % number, "text/plain"

        def ask(accept: str) -> int:
            headers = {"Accept": accept}
            return int(requests.get(f"{address}/metrics", headers=headers, timeout=30).text)

        it = server.MetricsServer(
            "127.0.0.1", 0, metrics=render, page=lambda _: b"", policy="", tick=lambda: None
        )
        address = f"http://127.0.0.1:{it.port}"
        with closing(it), ThreadPoolExecutor(30) as pool:
            first = pool.submit(ask, "text/plain")
            wait_for(lambda: begun, "the first page")
            later = [pool.submit(ask, "text/plain") for _ in range(28)]
            other = pool.submit(ask, "application/openmetrics-text")
            wait_for(lambda: len(it._server._open) == 30, "all who ask")
            begin.set()
            assert first.result() == 1
            # None has what was begun before it asked.
            assert all(number > 1 for number in [other.result(), *(one.result() for one in later)])
        assert len(begun) < 15
        assert begun.count("application/openmetrics-text") == 1


class TestCompression:
    def ask(self, it: Exporter, source: str) -> tuple[str | None, bytes]:
        connection = http.client.HTTPConnection(
            "127.0.0.1", it.port, timeout=30, source_address=(source, 0)
        )
        connection.request("GET", "/metrics", headers={"Accept-Encoding": "gzip, deflate"})
        answer = connection.getresponse()
        return answer.headers["Content-Encoding"], answer.read()

    def test_for_another_machine(self):
        with exporter() as it:
            encoding, body = self.ask(it, "127.0.0.2")
        assert encoding == "gzip"
        assert b"act_step" in gzip.decompress(body)

    def test_not_within_the_machine(self):
        with exporter() as it:
            encoding, body = self.ask(it, "127.0.0.1")
        assert encoding is None
        assert b"act_step" in body

    def test_over_ipv6(self):
        with exporter(host="::1") as it:
            assert "act_step" in requests.get(f"http://[::1]:{it.port}/metrics", timeout=30).text


def test_tls_before_1_2_is_refused(tmp_path, authority):
    with exporter(tls_config(tmp_path, authority, "  min_version: TLS13\n")) as it:
        context = ssl.create_default_context(cafile=tmp_path / "ca.crt")
        context.maximum_version = ssl.TLSVersion.TLSv1_2
        with (
            socket.create_connection(("127.0.0.1", it.port)) as plain,
            pytest.raises(ssl.SSLError),
        ):
            context.wrap_socket(plain, server_hostname="localhost")
