"""The exporter: what was taken from a trainer is judged, kept, exposed and served.

It knows no framework: an `Instrumentation` takes the tensors.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self, SupportsFloat

from prometheus_client import CollectorRegistry

from act_exporter.access import Access
from act_exporter.chronicle import Chronicle
from act_exporter.collector import LayerPage, Training, TrainingCollector, constants, render_page
from act_exporter.diagnosis import Diagnosis, Facts
from act_exporter.exceptions import SettingError, StateError
from act_exporter.faults import Faults
from act_exporter.history import History, Layers, Onset, Thresholds
from act_exporter.instrumentation import Instrumentation, Listener
from act_exporter.journal import Journal
from act_exporter.live import POLICY, LivePage, Source, Trail
from act_exporter.overhead import Overhead
from act_exporter.rows import Column
from act_exporter.sample import Norms, Sample, Update
from act_exporter.server import MetricsServer
from act_exporter.silence import Silence
from act_exporter.state import checked_windows
from act_exporter.taps import Tap
from act_exporter.targets import TargetFile, remove_stale
from act_exporter.training import TrainingHistory

log = logging.getLogger(__name__)

_STAGES = (
    "hook",
    "step",
    "record",
    "gradient",
    "update",
    "ranks",
    "server",
    "scrape",
    "silent",
    "journal",
)

# How far the learning rate may be from the one that was saved: from one step to the next schedules
# change it by less, but for the first four steps of a warm-up and the one at which it is cut.
_RATE_TOLERANCE = 0.2


class Exporter:
    """What `start_exporter` returns.

    Args:
        taps: what is watched, a row each.
        instrumented: has the trainer's tensors taken, once everything else was found to be good.

    Attributes:
        run: the run's name, the `run` label of every sample.
        port: the port of the page, or None where it could not be served.
        registry: client_python's registry behind the page; other families may join it.
    """

    def __init__(
        self,
        taps: Sequence[Tap],
        instrumented: Callable[[Listener], Instrumentation],
        *,
        run: str,
        rank: int,
        sample_every: int,
        thresholds: Thresholds,
        max_overhead: float | None = None,
        max_series: int | None = None,
        baseline: Mapping[tuple[str, str], float] | None = None,
        journal: Path | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if not run or not run.isprintable():
            raise SettingError(f"run={run!r} must be a name that can be printed")
        if isinstance(sample_every, bool) or not isinstance(sample_every, int) or sample_every < 1:
            raise SettingError(f"sample_every={sample_every!r} must be a whole number from 1 on")
        if max_overhead is not None and not 0 < max_overhead < 1:
            raise SettingError(f"max_overhead={max_overhead!r} must be a share between 0 and 1")
        if max_series is not None and not (type(max_series) is int and max_series > 0):
            raise SettingError(f"max_series={max_series!r} must be a whole number from 1 on")
        self.run = run
        self.port: int | None = None
        self.registry = CollectorRegistry()
        self._scrape_seconds: float | None = None
        self._errors = dict.fromkeys(_STAGES, 0)
        self._logged: set[tuple[str, type[Exception], str]] = set()
        self._sampled = 0  # the last sampled step
        self._silence = Silence(taps)
        self._standing = True  # nothing was trained since the run's step was set
        self._training = Training(finished_at=time.time(), sample_every=sample_every)
        self._server: MetricsServer | None = None
        self._target: TargetFile | None = None
        self._told_norm = False  # whether the trainer records the gradient norm itself
        self._clock = clock
        self._history = History(taps, thresholds, clock)
        self._history.set_baseline(baseline or {})
        self._onset: Onset | None = None  # as last said in the log
        self._numbers = TrainingHistory(thresholds, clock)
        self._diagnosis = Diagnosis(thresholds.clean_steps)
        self._norms: deque[Norms] = deque()  # that wait for the sample of their step
        self._changes: deque[Update] = deque()  # likewise
        self._judged = 0  # step of the newest sample that was judged
        self._saved_rate: float | None = None  # of a restored state, until a step has ended
        self._other_rate = False  # whether that step was made with another one
        self._seconds = 0.0  # spent on what was taken
        self._instrumentation = instrumented(
            Listener(self._finish_step, self._sample_without_step, self._count_error)
        )
        self._rank = str(rank)
        if self._instrumentation.joined:
            self._rank = "all"
            max_overhead = None  # each rank's own clock would have it sample steps of its own
        self._overhead = Overhead(max_overhead, sample_every)
        self._faults = Faults((tap.layer for tap in taps), self._instrumentation.fault)
        labels = {"run": run, "rank": self._rank}
        self._page = LayerPage(taps, labels, max_series)
        self._journal = (
            None
            if journal is None or not self._instrumentation.speaks
            else Journal(journal, run=run, rank=rank, taps=taps, on_error=self._count_error)
        )
        self._chronicle = Chronicle(self._journal, taps)
        self._trail = Trail(len(taps))
        self._live = LivePage(
            Source(
                **labels,
                taps=taps,
                thresholds=thresholds,
                max_overhead=max_overhead,
                training=lambda: self._training,
                trail=self._trail,
                registry=self.registry,
                errors=self._errors,
                faults=lambda: self._faults.factors,
            )
        )
        series = self._page.series + self._instrumentation.series
        self.registry.register(
            TrainingCollector(
                labels,
                lambda: self._training,
                self._errors,
                constants(thresholds, series),
                self._page.series_dropped,
                lambda: self._faults.factors,
                lambda: self._scrape_seconds,
                self._journal,
                self._instrumentation.memory,
            )
        )
        log.info("watching %d tensors of run %s", len(taps), run)
        if self._page.dropped:
            log.warning(
                "max_series=%d: %d of %d tensors are judged here and not on the page, such as %s",
                max_series,
                len(self._page.dropped),
                len(taps),
                self._page.dropped[0].layer,
            )

    def serve(
        self, host: str, port: int, *, targets: Path | None = None, access: Access | None = None
    ) -> None:
        """Serve the page; where that fails, log why and let training go on without it.

        With `reduce="global"` rank 0 serves, and the others do nothing here.

        Args:
            host: address to listen on.
            port: port; 0 for any free one.
            targets: a folder in which Prometheus looks for targets, to be listed there.
            access: who may see the page; None for everybody who reaches the port.
        """
        if not self._instrumentation.speaks:
            return
        try:
            self._server = MetricsServer(
                host,
                port,
                metrics=self._render,
                page=self._show,
                policy=POLICY,
                tick=self._refresh_target,
                access=access,
            )
        except (OSError, OverflowError, UnicodeError) as error:  # in use, too high, no such host
            self._count_error("server", error, f"no metrics on {host}:{port}")
            return
        self.port = self._server.port
        scheme = "http" if access is None else access.scheme
        log.info("metrics of run %s on %s://%s:%d/metrics", self.run, scheme, host, self.port)
        if targets is not None:
            self._list(targets, scheme, host, self.port)

    def _list(self, folder: Path, scheme: str, host: str, port: int) -> None:
        target = TargetFile(
            folder, run=self.run, rank=self._rank, scheme=scheme, host=host, port=port
        )
        try:
            target.write()
            if self._rank in ("0", "all"):  # one of all ranks is enough to look at the folder
                for path in remove_stale(folder):
                    log.info("removed %s: nobody has refreshed it for an hour", path)
        except OSError as error:
            self._count_error("server", error, f"not listed in {folder}")
        self._target = target

    def _refresh_target(self) -> None:
        try:
            if self._target is not None:
                self._target.refresh()
        except Exception as error:
            self._count_error("server", error, "not listed for Prometheus any more")

    def record(
        self,
        *,
        loss: SupportsFloat | None = None,
        grad_norm: SupportsFloat | None = None,
        loss_scale: SupportsFloat | None = None,
    ) -> None:
        """Expose the step's loss and gradient norm; call it before the optimizer's step.

        Args:
            loss: a number or a tensor of one element, on any device; never waited for.
            grad_norm: likewise, before clipping. From the first one on only those count, in place
                of the exporter's own.
            loss_scale: likewise; what the gradients are too large by. Not needed with `scaler=`.
        """
        try:
            told = {"loss": loss, "grad_norm": grad_norm, "loss_scale": loss_scale}
            values = {name: value for name, value in told.items() if value is not None}
            self._instrumentation.record(values)
            self._told_norm |= "grad_norm" in values
        except Exception as error:
            self._count_error("record", error)

    def step(self, step: int | None = None) -> None:
        """Say that the run has finished `step`, in place of counting the optimizers' steps.

        From the first call on only this counts. Called with a number before anything was trained
        it says where the run stands. `TrainingGuard` calls it by itself.

        Args:
            step: the step; the one after the last, if none is given.
        """
        try:
            finished = self._training.step + 1 if step is None else step
            self._instrumentation.set_step(finished)
            if step is not None and self._standing and self._instrumentation.idle:
                self._training = dataclasses.replace(self._training, step=finished)
                self._sampled = finished
                self._faults.resume(finished)
            else:
                self._finish_step(finished)
        except Exception as error:
            self._count_error("step", error)

    def onset(self) -> int | None:
        """The first step of the present anomaly.

        That is the first at which a layer broke the hard rule or was not finite, or from which on
        the gradient norm was 20 times its mean. None when there is none: since the last reset, or
        for 100 sampled steps.
        """
        self._take_in()
        layers = self._history.onset
        onsets = [self._numbers.onset, layers.step if layers is not None else None]
        return min((onset for onset in onsets if onset is not None), default=None)

    def reset(self, generation: int) -> None:
        """Begin a generation: the steps since the restored one never happened.

        Onset, peaks and counts in a row are forgotten; baseline, window and counters stay.
        """
        self._instrumentation.forget()
        self._norms.clear()
        self._changes.clear()
        self._judged = 0
        self._history.reset()
        self._numbers.reset()
        # Its step comes again, and a process that begins after a rollback may ask for it again.
        if generation:
            self._faults.end(f"the run was rolled back, to generation {generation}")
        self._resumed()
        self._standing = True
        self._onset = None
        self.note("rollback", to=generation)
        self._training = dataclasses.replace(
            self._training,
            generation=generation,
            signals={},
            gradients={},
            update=None,
            layers=None,
            verdict=None,
        )

    def note(self, kind: str, /, **fields: Any) -> None:
        """Write down something that happened: what a guard did, say.

        It goes into the journal, where there is one, and the page at `/` tells of it if it is of
        a kind that it knows. Never raises.

        Args:
            kind: what happened; `act_exporter.records` lists the kinds that a report knows.
            fields: whatever else there is to say, as JSON knows it, best of strings and numbers;
                `step` in place of the last finished one.
        """
        now = self._training
        at = {"step": now.step, "time": time.time(), "generation": now.generation}
        try:
            self._trail.note(kind, **{**at, **fields})
            self._chronicle.note(kind, **{**at, **fields})
        except Exception as error:
            self._count_error("journal", error)

    def rebaseline(self) -> None:
        """Learn baselines and windows anew (another data mix, a new learning rate)."""
        self._history.rebaseline()
        self._numbers.rebaseline()
        self._instrumentation.look_often(learnt=False)

    def inject_fault(
        self, layer: str, factor: float, step: int, *, steps: int | None = None
    ) -> None:
        """Make a layer's output too large on purpose, to try alarm and rollback.

        For a copy of a run: what is trained meanwhile is spoilt. The output, of a tuple its first
        tensor, is multiplied in training, and gradients flow through it; where no tensor of floats
        is found in it, nothing is changed and the log says so. It happens once: a rollback ends it
        for good, and a process that goes on from a later step, or in a generation after the first,
        does not begin it. The log and `act_injected_fault` say so meanwhile. A
        compiled model is compiled again after this call and after the end. In each rank that
        shall have it.

        Args:
            layer: the name of a watched layer, as the label `layer` has it.
            factor: what its output is multiplied by; NaN and infinity serve too.
            step: the first step that has it.
            steps: how many steps have it; None for all until the guard rolls back or `close()`.

        Raises:
            SettingError: there is no such layer, `step` is over, or another fault waits or is in
                force.
        """
        self._faults.arm(layer, factor, step, steps, finished=self._training.step)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Count nothing in the block: a save, a load or a trial run."""
        before = self._instrumentation.paused
        self._instrumentation.paused = True
        try:
            yield
        finally:
            self._instrumentation.paused = before
            self._instrumentation.drop()
            self._overhead.pause()

    def state_dict(self) -> dict[str, Any]:
        """Step, learning rate, baselines and windows: arrays, numbers and strings only."""
        self._take_in()
        rate = self._instrumentation.learning_rate
        return {
            **({} if rate is None else {"learning_rate": rate}),
            "step": self._training.step,
            "history": self._history.state_dict(),
            "numbers": self._numbers.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved state; layers that it does not know learn anew.

        Raises:
            StateError: not such a state; nothing was loaded.
        """
        # The others came after the first states that were saved; no rate is known before a step.
        needed, others = {"step", "history"}, {"numbers", "learning_rate"}
        if not isinstance(state, dict) or set(state) - others != needed:
            raise StateError("exporter state: expected a dict with 'step' and 'history'")
        rate = state.get("learning_rate")
        if rate is not None and not (type(rate) is float and 0 <= rate < math.inf):
            raise StateError(f"exporter state: learning rate {rate!r} cannot be")
        if type(state["step"]) is not int or state["step"] < 0:
            raise StateError(f"exporter state: step {state['step']!r} is no step")
        # Looked at before anything is taken over.
        numbers = checked_windows(state.get("numbers", {}), self._numbers.state_dict())
        self._history.load_state_dict(state["history"])
        self._numbers.load_state_dict(numbers)
        self._saved_rate, self._other_rate = rate, False
        self._resumed()
        self._instrumentation.restart(state["step"])
        self._standing = True
        self._sampled = state["step"]
        self._training = dataclasses.replace(self._training, step=state["step"])
        self._faults.resume(state["step"])

    def close(self) -> None:
        """Remove the hooks and stop serving; a second call does nothing."""
        self._faults.end("the exporter was closed")
        self._instrumentation.close()
        if self._journal is not None:
            self._journal.close()
        if self._target is not None:
            self._target.remove()
        if self._server is not None:
            self._server.close()
            self._server = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _resumed(self) -> None:
        self._diagnosis.resumed()
        self._instrumentation.look_often(learnt=self._numbers.is_learnt("update_rms"))

    def _finish_step(self, step: int) -> None:
        """The one place where data moves on: rows to history, history to the page."""
        if self._instrumentation.paused:
            return
        started = time.perf_counter()
        before = self._training
        self._standing = False
        # First, so that an error below costs a sample and never the step.
        self._training = dataclasses.replace(
            before,
            step=step,
            # Where only some steps are told of, those between have ended too.
            steps=before.steps + max(step - before.step, 0),
            finished_at=time.time(),
            probe_seconds=self._instrumentation.seconds + self._seconds,
            overhead=self._overhead.ratio(),
            sample_every=self._overhead.sample_every,
        )
        try:
            self._faults.begin(step + 1)
            self._compare_rates()
            if self._instrumentation.sampling:
                self._sampled = step
                self._instrumentation.take(step)
            else:
                self._instrumentation.skip()
        except Exception as error:
            self._count_error("step", error)
        self._take_in()
        self._instrumentation.end_step()
        self._seconds += time.perf_counter() - started
        # At the very end: what this took belongs to the step that it was taken for.
        if self._overhead.step(self._clock(), self._instrumentation.sampling):
            log.warning(
                "looking costs too much of a step: from now on each %d. step is sampled",
                self._overhead.sample_every,
            )
        following = step + max(step - before.step, 1)
        self._instrumentation.sampling = self._overhead.samples(following - self._sampled)

    def _sample_without_step(self) -> None:
        """Look at forwards that no optimizer's step has followed: they may be why."""
        if self._instrumentation.sampling:
            self._instrumentation.take(self._training.step + 1, stepped=False)
            self._take_in()
        self._instrumentation.sampling = True

    def _take_in(self) -> None:
        """Judge the samples that have arrived from the devices."""
        judged: list[Layers] = []
        numbers: dict[int, dict[str, float]] = defaultdict(dict)
        try:
            for sample in self._instrumentation.samples():
                self._judged = sample.step
                rate = self._instrumentation.learning_rate
                sick = self._training.verdict is not None
                judged.append(self._history.observe(sample, rate, sick))
                self._chronicle.sample(sample, judged[-1], self._training.generation)
                self._trail.sample(sample, judged[-1], self._training.generation)
                self._numbers.observe(sample.step, sample.values)
                known = sample.values if rate is None else {**sample.values, "learning_rate": rate}
                numbers[sample.step] |= known
                values = self._training.values | known
                self._training = dataclasses.replace(
                    self._training, values=values, layers=judged[-1]
                )
                self._notice_silence(sample)
            # After the samples, which bring the loss scale.
            self._norms += self._instrumentation.norms(self._training.values.get("loss_scale"))
            while self._norms and self._norms[0].step <= self._judged:
                norms = self._norms.popleft()
                values = norms.values(told=self._told_norm)
                numbers[norms.step] |= values
                self._numbers.observe(norms.step, values)
                self._training = dataclasses.replace(
                    self._training,
                    values=self._training.values | values,
                    gradients=norms.layers,
                )
            self._changes += self._instrumentation.updates()
            while self._changes and self._changes[0].step <= self._judged:
                update = self._changes.popleft()
                numbers[update.step] |= update.values
                self._numbers.observe(update.step, update.values)
                self._training = dataclasses.replace(self._training, update=update)
            self._chronicle.numbers(numbers, self._training.finished_at, self._training.generation)
            self._trail.numbers(numbers)
            for layers in judged:
                self._diagnose(layers)
        except Exception as error:
            self._count_error("step", error)

    def _diagnose(self, layers: Layers) -> None:
        facts = Facts(
            bad=layers.bad,
            nonfinite_share=layers.nonfinite_share,
            loss=self._numbers.level("loss"),
            grad_norm=self._numbers.level("grad_norm"),
            update=self._numbers.level("update_rms"),
            other_rate=self._other_rate,
        )
        self._other_rate = False
        verdict = self._diagnosis.observe(facts)
        onset = layers.onset
        if onset is None and self._onset is not None:
            self.note("clean")
        if onset is not None and onset != self._onset:
            self.note("onset", verdict=verdict, **dataclasses.asdict(onset))
            log.warning(
                "step %d: %s of %s went bad first (rule %s); by how it began: %s",
                onset.step,
                onset.tensor,
                onset.layer,
                onset.rule,
                verdict,
            )
        elif verdict != self._training.verdict:
            self.note("verdict", verdict=verdict)
        self._onset = onset
        self._training = dataclasses.replace(
            self._training, signals=self._numbers.signals, verdict=verdict
        )

    def _compare_rates(self) -> None:
        """The first step after a restored state has ended: is its learning rate the saved one?"""
        saved, self._saved_rate = self._saved_rate, None
        rate = self._instrumentation.learning_rate
        # A rate of 0, where a warm-up begins, is followed by any other.
        if saved and rate is not None and not math.isclose(rate, saved, rel_tol=_RATE_TOLERANCE):
            self._other_rate = True
            log.warning("the learning rate is %g; with the restored state came %g", rate, saved)

    def _notice_silence(self, sample: Sample) -> None:
        wrong = self._silence.observe(sample.rows[:, Column.CALLS])
        if wrong is not None:
            self._count_error("silent", RuntimeError(wrong), "no statistics")

    def _render(self, accept: str) -> tuple[bytes, str]:
        try:
            return self._draw(accept)
        except Exception as error:
            self._count_error("scrape", error)
            raise

    def _show(self, query: str) -> bytes:
        try:
            return self._live.render(query)
        except Exception as error:
            self._count_error("scrape", error)
            raise

    def _draw(self, accept: str) -> tuple[bytes, str]:
        started = time.perf_counter()
        page = render_page(accept, self.registry, self._page, self._training.layers)
        self._scrape_seconds = time.perf_counter() - started
        return page

    def _count_error(self, stage: str, error: Exception, what: str = "training goes on") -> None:
        self._errors[stage] += 1
        with contextlib.suppress(Exception):  # a log's handler may fail, an error have no text
            self._log(stage, error, what)

    def _log(self, stage: str, error: Exception, what: str) -> None:
        cause = (stage, type(error), str(error))
        if cause not in self._logged and len(self._logged) < 100:
            self._logged.add(cause)
            log.error("%s (%s): %s: %s", what, stage, type(error).__name__, error)
