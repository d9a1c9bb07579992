"""Saves checkpoints one after another, publishes them, and clears away what is no longer needed."""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from alerting.exceptions import CheckpointError
from alerting.recovery.checkpoints import CheckpointStore
from alerting.recovery.chronicle import Chronicle
from alerting.recovery.failures import cause
from alerting.recovery.health import HealthRecord, verdict
from alerting.recovery.ledger import LedgerFile
from alerting.recovery.lineage import Checkpoint, before_onset, expendable, line
from alerting.recovery.manifest import RESUMABLE, Kind, Manifest
from alerting.recovery.ranks import Ranks
from alerting.recovery.save import Save
from alerting.recovery.state import State
from alerting.recovery.versions import versions

log = logging.getLogger(__name__)


class Saver:
    """The way from a live training state to a published checkpoint.

    Each method that saves or publishes is called by all ranks at the same step; what is said of
    checkpoints and counted is rank 0's.

    Attributes:
        descent: names of the checkpoints that the live state descends from, newest first.
        last_seconds: from the boundary to complete files, of the last save that succeeded.
        failures: saves that failed in this process.
        writers: the ranks, as the writing threads speak to each other.
    """

    def __init__(
        self,
        *,
        store: CheckpointStore,
        state: State,
        onset: Callable[[], int | None],
        ledger: LedgerFile,
        ranks: Ranks,
        keep: int,
        onset_margin_steps: int,
        chronicle: Chronicle,
    ) -> None:
        self._chronicle = chronicle
        self._ranks = ranks
        self.writers = ranks.twin()
        self._store = store
        self._state = state
        self._onset = onset
        self._ledger = ledger
        self._keep = keep
        self._margin = onset_margin_steps
        self._executor: ThreadPoolExecutor | None = None
        self._save: Save | None = None
        self.descent: tuple[str, ...] = ()
        self.last_seconds: float | None = None
        self.failures = 0

    @property
    def busy(self) -> bool:
        """Whether a save is in flight: begun and not published."""
        return self._save is not None

    @property
    def writing(self) -> bool:
        """Whether this rank's files of the save in flight are not complete."""
        return self._save is not None and not self._save.done

    def begin(self, step: int, kind: Kind) -> None:
        """Begin a save of the state after `step` steps; none may be in flight.

        Raises:
            CheckpointError: it could not begin. Counted and cleared away.
        """
        draft = self._ranks.lead(lambda: self._draft(step, kind))
        folder = self._store.unpublished(draft.name)
        if self._executor is None:
            self._executor = ThreadPoolExecutor(1, thread_name_prefix="act-checkpoint")
        try:
            # No rank begins to write before each has its copy, or it would wait for the others'.
            with self._ranks.united():
                snapshot = self._state.capture(step, folder)
        except Exception as error:
            raise self._failed(draft, error) from error
        self._save = Save(snapshot, draft, folder, self.writers, self._executor)

    def publish(self) -> Checkpoint | None:
        """Publish the save in flight, waiting for it where it is not done; None without one.

        Raises:
            CheckpointError: it failed. Counted and cleared away.
        """
        if self._save is None:
            return None
        manifest = self._save.manifest
        try:
            # An interrupt while waiting leaves it in flight, to be finished on the way out.
            with self._ranks.united():
                seconds = self._save.result()
            self._save = None
            checkpoint = self._ranks.lead(lambda: self._publish(manifest, seconds))
        except Exception as error:
            self._save = None
            raise self._failed(manifest, error) from error
        return checkpoint

    def settle(self) -> Checkpoint | None:
        """Wait for the save in flight and publish it; a failure is logged, not raised."""
        try:
            return self.publish()
        except CheckpointError:
            return None

    def save_now(self, step: int, kind: Kind) -> Checkpoint:
        """Save and wait; the save in flight is finished first.

        Raises:
            CheckpointError: it failed.
        """
        self.settle()
        self.begin(step, kind)
        checkpoint = self.publish()
        if checkpoint is None:
            raise CheckpointError(f"the save of step {step} vanished")
        return checkpoint

    def close(self) -> None:
        """Finish the save in flight and let the writing thread go.

        Of several ranks each comes here by itself, and some perhaps never: there the save is not
        published, and the next process clears it away.
        """
        if self._ranks.size == 1:
            self.settle()
        if self._executor is not None:
            self._executor.shutdown()
            self._executor = None

    def _draft(self, step: int, kind: Kind) -> Manifest:
        """The manifest, but for the files, of a checkpoint whose folder is there now."""
        store, parent, generation = self._store, self.descent, self._ledger.now.generation
        name = store.new_name(step, generation, kind)
        draft = Manifest(
            name=name,
            kind=kind,
            number=store.next_number(),
            step=step,
            generation=generation,
            parent=parent[0] if parent else None,
            ancestors=tuple(old for old in parent[1:] if (store.path / old).exists()),
            world_size=self._ranks.size,
            data=self._state.data,
            versions=versions(),
            created_at=time.time(),
            files={},
            remedies=self._ledger.now.remedies,
        )
        try:
            store.unpublished(name).mkdir()
        except OSError as error:
            raise self._failed(draft, error) from error
        return draft

    def _publish(self, manifest: Manifest, seconds: float) -> Checkpoint:
        checkpoint = self._store.publish(manifest.name, self._first_health(manifest))
        log.info(
            "step %d: published checkpoint %s (%s) after %.2f s",
            manifest.step,
            manifest.name,
            checkpoint.health.health,
            seconds,
        )
        self._chronicle.tell(
            "checkpoint",
            step=manifest.step,
            name=manifest.name,
            kind=manifest.kind,
            health=checkpoint.health.health,
            why=checkpoint.health.reason,
            seconds=round(seconds, 3),
        )
        self.last_seconds = seconds
        if manifest.kind in RESUMABLE:
            parent = [manifest.parent] if manifest.parent else []
            self.descent = (manifest.name, *parent, *manifest.ancestors)
        self._clear_away()
        return checkpoint

    def _first_health(self, manifest: Manifest) -> HealthRecord:
        if manifest.kind == "emergency":
            return verdict("suspect", "made when a recovery began, for people")
        onset = self._onset()
        if onset is not None and not before_onset(manifest.step, onset, self._margin):
            return verdict("suspect", f"step {onset} was bad when it was published")
        return verdict("pending", "no bad step was known from before it when it was published")

    def _failed(self, manifest: Manifest, error: BaseException) -> CheckpointError:
        self.failures += 1
        sentence = f"checkpoint {manifest.name} could not be saved: {cause(error)}"
        log.error("step %d: %s", manifest.step, sentence)
        if self._ranks.rank == 0:
            shutil.rmtree(self._store.unpublished(manifest.name), ignore_errors=True)
        return CheckpointError(sentence)

    def _clear_away(self) -> None:
        try:
            ledger, checkpoints = self._ledger.now, self._store.all()
            own = line(checkpoints, generation=ledger.generation, base=ledger.base)
            surplus = expendable(
                checkpoints, line=own, resumed_from=ledger.resumed_from, keep=self._keep
            )
        except OSError as error:
            log.warning("old checkpoints could not be deleted: %s", error)
            return
        for checkpoint in surplus:
            try:
                self._store.delete(checkpoint, f"keep={self._keep}, not among those kept")
            except OSError as error:
                # One that is stuck must not fill the disk with all that come after it.
                log.warning("checkpoint %s could not be deleted: %s", checkpoint.name, error)
