"""What the receiver takes, and how soon: a real process, durable before each answer.

    python -m tests.benchmarks.receiver            (two minutes; --quick in a quarter of one)

Sender and receiver share the machine, and the database lies in build/bench, so on its disk. Each
part has a receiver of its own. Writes build/bench/receiver.json:

    accepted_per_second  single-alert notifications acknowledged (202, synchronous=FULL), from
                         `connections` that each send the next one when the last is answered;
                         median of the rounds
    p50_ms, p99_ms       from when a notification was due to the end of its answer, at 50 a second;
                         a slow answer delays no other, and what is late counts as late
    request_ms           from before the POST to when the guard sees the request file, `median` and
                         `worst`, one incident after the other
    fsync_ms             one page appended and synced in the same folder, the floor of all these
    load_average         of the minute before: well below `cores` if nothing else ran

Every acknowledged notification must be in the database and every incident have had one request;
otherwise nothing is written and the exit code is 1.
"""

from __future__ import annotations

import itertools
import json
import os
import socket
import sqlite3
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from rich.progress import Progress, track

from deploy.demo.servers import wait_for
from tests.alerting.deliveries import alert, register, text
from tests.alerting.test_control import answer_to
from tests.alerting.test_receiver import TOKEN, Receiver, receiving
from tests.benchmarks.report import parser_of, setting, write

CONNECTIONS = 16
"""More than an Alertmanager opens to one receiver; commits are shared between them."""
RATE = 50
"""Notifications a second: a cluster of runs in trouble at once."""
SENDERS = 64
"""At 50 a second none has to wait for another's answer unless answers take over a second."""


class Connection:
    """One that is kept, as Alertmanager keeps its; parses no more than it must."""

    def __init__(self, address: str) -> None:
        self._host = urlsplit(address).netloc
        name, port = self._host.split(":")
        self._socket = socket.create_connection((name, int(port)), timeout=30)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def post(self, body: bytes) -> bool:
        """Whether it was acknowledged."""
        self._socket.sendall(
            f"POST /alerts HTTP/1.1\r\nHost: {self._host}\r\nAuthorization: Bearer {TOKEN}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode()
            + body
        )
        data = b""
        while b"\r\n\r\n" not in data:
            data += self._receive()
        head, _, content = data.partition(b"\r\n\r\n")
        (length,) = (
            int(line.split(b":")[1])
            for line in head.lower().split(b"\r\n")
            if line.startswith(b"content-length:")
        )
        while len(content) < length:
            content += self._receive()
        return head.split(b" ", 2)[1] == b"202"

    def close(self) -> None:
        """Hang up."""
        self._socket.close()

    def _receive(self) -> bytes:
        data = self._socket.recv(65536)
        if not data:
            raise ConnectionError("the receiver hung up")
        return data


@contextmanager
def connections(address: str, count: int) -> Iterator[list[Connection]]:
    """Open that many, and close them."""
    opened = [Connection(address) for _ in range(count)]
    try:
        yield opened
    finally:
        for connection in opened:
            connection.close()


def require(count: int, receiver: Receiver, statement: str, what: str) -> None:
    """End the benchmark where the database does not say what was acknowledged."""
    ((found,),) = (tuple(row.values()) for row in receiver.rows(statement))
    if found != count:
        sys.exit(f"{what}: {count} were acknowledged or made, the database has {found}")


def measure_accepted(receiver: Receiver, rounds: int, seconds: float) -> list[float]:
    """Acknowledged a second, one figure a round."""
    body = text(alert(run="nobody")).encode()
    rates, total = [], 0
    with connections(receiver.address, CONNECTIONS) as opened:
        for _ in track(range(rounds), "accepted a second"):
            begun = time.monotonic()

            def send(connection: Connection, until: float = begun + seconds) -> int:
                count = 0
                while time.monotonic() < until:
                    count += connection.post(body)
                return count

            with ThreadPoolExecutor(CONNECTIONS) as pool:
                count = sum(pool.map(send, opened))
            rates.append(count / (time.monotonic() - begun))
            total += count
    require(total, receiver, "SELECT count(*) FROM deliveries", "accepted a second")
    return rates


def measure_acknowledgement(receiver: Receiver, seconds: float) -> list[float]:
    """Seconds from when each notification was due to its acknowledgement."""
    count = int(RATE * seconds)
    bodies = [text(alert(run="gpt", layer=f"blocks.{number}")).encode() for number in range(count)]
    took = [0.0] * count
    turn = itertools.count()
    lock = threading.Lock()
    with connections(receiver.address, SENDERS) as opened, Progress() as progress:
        task = progress.add_task(f"acknowledged at {RATE} a second", total=count)
        begun = time.monotonic() + 0.5  # the threads have started by then

        def send(connection: Connection) -> int:
            acknowledged = 0
            while True:
                with lock:
                    number = next(turn)
                if number >= count:
                    return acknowledged
                due = begun + number / RATE
                time.sleep(max(0.0, due - time.monotonic()))
                acknowledged += connection.post(bodies[number])
                took[number] = time.monotonic() - due
                progress.advance(task)

        with ThreadPoolExecutor(SENDERS) as pool:
            acknowledged = sum(pool.map(send, opened))
    if acknowledged != count:
        sys.exit(f"{count - acknowledged} of {count} notifications were not acknowledged")
    require(count, receiver, "SELECT count(*) FROM deliveries", "acknowledged")
    return took


def measure_request(receiver: Receiver, incidents: int) -> list[float]:
    """Seconds from before each POST to its request file."""
    control = register(receiver.runs)
    path = control.path / "requests" / "recover.json"
    took = []
    with connections(receiver.address, 1) as (connection,):
        for number in track(range(incidents), "to the request file"):
            body = text(alert(layer=f"blocks.{number}")).encode()
            # At another place of the worker's poll each time.
            time.sleep(0.05 + number % 10 / 40)
            begun = time.monotonic()
            sender = threading.Thread(target=connection.post, args=(body,))
            sender.start()
            while not path.exists():
                if time.monotonic() > begun + 30:
                    sys.exit("no request file within 30 s")
                time.sleep(0.0002)
            took.append(time.monotonic() - begun)
            sender.join()
            asked = control.open_request("recover")
            assert asked is not None
            control.answer(answer_to(asked))
    wait_for(
        lambda: not receiver.rows("SELECT 1 FROM requests WHERE answered_at IS NULL"), "answers"
    )
    require(incidents, receiver, "SELECT count(*) FROM requests", "requests")
    return took


def measure_fsync(folder: Path) -> float:
    """Seconds for one page, appended and on the disk; median."""
    took = []
    with (folder / "page").open("wb", buffering=0) as file:
        for _ in range(101):
            begun = time.monotonic()
            file.write(bytes(4096))
            os.fsync(file.fileno())
            took.append(time.monotonic() - begun)
    return statistics.median(took)


def run(quick: bool, folder: Path) -> dict[str, Any]:
    """All parts, each with a receiver and a database of its own."""
    load = os.getloadavg()[0]

    def part(name: str, measure: Callable[[Receiver], list[float]]) -> list[float]:
        (folder / name).mkdir()
        with receiving(folder / name, folder / name / "runs") as receiver:
            return measure(receiver)

    requests = part("request", lambda receiver: measure_request(receiver, 20 if quick else 150))

    def acknowledgement(receiver: Receiver) -> list[float]:
        # Registered, so that the worker has its whole work beside the answers.
        register(receiver.runs)
        return measure_acknowledgement(receiver, 3 if quick else 60)

    acknowledged = sorted(part("acknowledgement", acknowledgement))
    rounds, seconds = (1, 2.0) if quick else (5, 4.0)
    rates = part("accepted", lambda receiver: measure_accepted(receiver, rounds, seconds))

    def milliseconds(value: float) -> float:
        return round(value * 1e3, 1)

    def percentile(share: float) -> float:
        return milliseconds(
            acknowledged[min(int(len(acknowledged) * share), len(acknowledged) - 1)]
        )

    return {
        **setting(
            VERSIONS,
            load_average=round(load, 2),
            fsync_ms=round(measure_fsync(folder) * 1e3, 2),
            sqlite=sqlite3.sqlite_version,
        ),
        "accepted_per_second": round(statistics.median(rates)),
        "connections": CONNECTIONS,
        "rounds": [round(rate) for rate in rates],
        "p50_ms": percentile(0.50),
        "p99_ms": percentile(0.99),
        "worst_ms": milliseconds(acknowledged[-1]),
        "rate_per_second": RATE,
        "notifications": len(acknowledged),
        "request_ms": {
            "median": milliseconds(statistics.median(requests)),
            "worst": milliseconds(max(requests)),
            "incidents": len(requests),
        },
    }


VERSIONS = ("act-exporter", "fastapi", "pydantic", "starlette", "uvicorn")


def main() -> None:
    """Measure and write the file."""
    parser = parser_of(__doc__, "receiver.json", "a few of each")
    arguments = parser.parse_args()
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=arguments.out.parent, prefix="receiver-") as folder:
        result = run(arguments.quick, Path(folder))
    print(json.dumps(result, indent=1))
    write(result, arguments.out)


if __name__ == "__main__":
    main()
