"""Which of several receivers sends a message: claims in a folder that all of them have.

    SHARED/HASH/1    the first claim to a message for one target: whose it is, what came of it
    SHARED/HASH/2    the next: it was not taken, its sender died, or it is the reminder of an hour
                     later, which has the same key

HASH is of what identifies the message for people, with the target's name. A claim is made as a
request is (see `alerting.control`): exactly one receiver makes number N. No number is used twice,
so who takes the place of a dead one cannot take a living one's, and after that only its maker
writes to it.

Nothing here holds a message up: where the folder is away or hangs there is no claim, and what is to
be sent is sent without. What was claimed and not finished is taken over after `PATIENCE_SECONDS`.
So people read a message once while all goes well, twice in these two cases, and never not at all.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import secrets
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from alerting.files import create_whole, write_atomically
from alerting.outbox import SKEW_SECONDS

log = logging.getLogger(__name__)

PATIENCE_SECONDS = 60.0
"""An attempt to send ends within 35 s by its own limits. Measured by who waits, since the clocks of
two machines differ."""
LIMIT_SECONDS = 5.0
"""A network file system that has no answer by then is away: people do not wait for it."""
KEEP_SECONDS = 86_400.0
"""How long claims stay, or twice the repeat interval where that is longer: a receiver that was down
for a night then learns that its messages were sent."""
_TRIES = 10
"""Each try in vain is another receiver that was faster, of which there are two or three."""

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class Claim:
    """A claim as it is in the folder.

    Attributes:
        path: its file.
        owner: the receiver that made it.
        at: when its message came, Unix seconds.
        sent: whether it was sent, None where that is not decided.
        mine: whether it was made just now, for who asked.
    """

    path: Path
    owner: str
    at: float
    sent: bool | None = None
    mine: bool = False


class Claims:
    """The claims of one thread of a receiver. No method raises; each takes `LIMIT_SECONDS` at most.

    Args:
        folder: equal for all receivers; made where its parent is there.
        monotonic: seconds.
    """

    def __init__(self, folder: Path, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._folder = folder
        # Anew in each process: two receivers may have one host name. After a restart its own claims
        # are waited for like anybody's.
        self._owner = f"{socket.gethostname()}-{secrets.token_hex(4)}"
        self._monotonic = monotonic
        self._seen: dict[Path, float] = {}
        self._pending: Future[Any] | None = None
        self._is_away = False

    def take(self, key: str, at: float, since: float) -> Claim | None:
        """Claim a message, or the claim that another receiver has.

        Args:
            key: equal for what is one message to one target.
            at: when it came, Unix seconds.
            since: what came under this key since then is the same message.

        Returns:
            A claim that is `mine`, to be finished; else another's that was sent, or may be being
            sent and is to be asked for again; or None where the folder is away.
        """
        return self._within_limit(lambda: self._take(key, at, since))

    def finish(self, claim: Claim, *, sent: bool) -> None:
        """Say what came of a claim of mine; one that was not sent is anybody's to make anew."""
        text = _to_json(claim.owner, claim.at, sent)
        self._within_limit(lambda: write_atomically(claim.path, text))

    def sweep(self, keep_seconds: float) -> None:
        """Remove claims that nobody asks for any more; may take as long as it takes."""
        limit = time.time() - keep_seconds
        try:
            for folder in self._folder.iterdir():
                # One that is used meanwhile is not empty and stays.
                with contextlib.suppress(OSError):
                    if folder.stat().st_mtime < limit:
                        for path in folder.iterdir():
                            path.unlink()
                        folder.rmdir()
        except FileNotFoundError:
            pass
        except OSError as error:
            log.warning("Old claims in %s were not removed: %s", self._folder, error)

    def _take(self, key: str, at: float, since: float) -> Claim:
        folder = self._folder / hashlib.sha256(key.encode()).hexdigest()
        for _ in range(_TRIES):
            # Never its parents: below a mount point that is empty they would be nobody else's.
            self._folder.mkdir(exist_ok=True)
            folder.mkdir(exist_ok=True)
            numbers = sorted(int(path.name) for path in folder.iterdir() if path.name.isdigit())
            known = [_read(folder / str(number), at) for number in numbers]
            same = [claim for claim in known if since < claim.at < at + SKEW_SECONDS]
            for claim in same:
                if claim.sent:
                    self._forget(folder)
                    return claim
            if same and same[-1].sent is None and self._is_held(same[-1]):
                return same[-1]
            path = folder / str(numbers[-1] + 1 if numbers else 1)
            mine = Claim(path=path, owner=self._owner, at=at, mine=True)
            temporary = folder / f".claim-{self._owner}"
            # Swept by another just now, where it is gone.
            with contextlib.suppress(FileNotFoundError):
                if create_whole(path, _to_json(mine.owner, at, None), temporary):
                    self._forget(folder)
                    return mine
        raise OSError(f"{folder} changes all the time")

    def _is_held(self, claim: Claim) -> bool:
        if claim.owner == self._owner:
            # What came of it could not be written.
            return False
        now = self._monotonic()
        return now - self._seen.setdefault(claim.path, now) < PATIENCE_SECONDS

    def _forget(self, folder: Path) -> None:
        self._seen = {path: at for path, at in self._seen.items() if path.parent != folder}

    def _within_limit(self, work: Callable[[], T]) -> T | None:
        """What `work` returns, or None where the folder is away: a mount may hang for ever."""
        try:
            if self._pending is not None and not self._pending.done():
                raise TimeoutError("it still hangs")  # noqa: TRY301
            future: Future[T] = Future()
            self._pending = future
            threading.Thread(target=_run, args=(work, future), name="claims", daemon=True).start()
            result = future.result(LIMIT_SECONDS)
        except Exception as error:
            # Whatever it is, people must hear.
            if not self._is_away:
                log.warning(
                    "The shared folder %s cannot be used, so people may be told twice: %s",
                    self._folder,
                    str(error) or f"no answer within {LIMIT_SECONDS:g} s",
                )
            self._is_away = True
            return None
        if self._is_away:
            log.warning("The shared folder %s can be used again.", self._folder)
        self._is_away = False
        return result


def _run(work: Callable[[], T], future: Future[T]) -> None:
    try:
        future.set_result(work())
    except Exception as error:
        future.set_exception(error)


def _to_json(owner: str, at: float, sent: bool | None) -> str:
    return json.dumps({"owner": owner, "at": at, "claimed_at": time.time(), "sent": sent}) + "\n"


def _read(path: Path, at: float) -> Claim:
    """The claim; one that is mangled or was swept just now is somebody's, of this message."""
    try:
        content = json.loads(path.read_bytes())
        sent = content["sent"]
        return Claim(
            path=path,
            owner=str(content["owner"]),
            at=float(content["at"]),
            sent=None if sent is None else bool(sent),
        )
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return Claim(path=path, owner="another receiver", at=at)
