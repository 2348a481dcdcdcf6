"""Work in the background, one piece of each kind at a time: watched, and cancelled between two steps."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch


class CancelledError(Exception):
    """The person asked for the end of a job."""


@dataclass
class Job:
    """A piece of work, as its thread and the page see it."""

    kind: str
    text: str
    cancellable: bool = True
    fraction: float | None = None
    stop: threading.Event = field(default_factory=threading.Event)

    def report(self, text: str, fraction: float | None) -> None:
        """Called by the work; raises CancelledError once a person has cancelled it."""
        if self.stop.is_set():
            raise CancelledError
        self.text = text
        if fraction is not None:
            self.fraction = fraction


class Jobs:
    """All that runs beside the page.

    Args:
        failed: Called with a line about a job that ended with an error.
    """

    def __init__(self, failed: Callable[[str], object]) -> None:
        self._failed = failed
        self._running: dict[str, tuple[Job, threading.Thread]] = {}
        self._ending: dict[str, tuple[Job, threading.Thread]] = {}  # done, but for what follows
        self._lock = threading.Lock()
        self._threads = torch.get_num_threads()

    def start(
        self, job: Job, work: Callable[[Job], object], *, then: Callable[[], object] = lambda: None
    ) -> bool:
        """Run work(job) in a thread, and then() once it has ended well. False if such a job is running."""
        with self._lock:
            if job.kind in self._running:
                return False
            thread = threading.Thread(target=self._run, args=(job, work, then), name=job.kind, daemon=True)
            self._running[job.kind] = (job, thread)
            thread.start()
        return True

    def shown(self) -> Job | None:
        """The one that the page shows: the one a person waits for first."""
        order = ("refit", "export", "train", "map")
        with self._lock:
            found = {kind: job for kind, (job, _) in (self._ending | self._running).items()}
        return next((found[kind] for kind in order if kind in found), None)

    def cancel(self) -> Job | None:
        """Ask the shown job to end; it may take a moment."""
        job = self.shown()
        if job is not None and job.cancellable:
            job.stop.set()
            return job
        return None

    def close(self, seconds: float = 10.0) -> None:
        """Ask all jobs to end, and wait."""
        for job, thread in list(self._running.values()):
            job.stop.set()
            if job.cancellable:
                thread.join(seconds)

    def wait(self, seconds: float = 240.0) -> None:
        """Until nothing is running, nor what followed it; an error if that takes longer."""
        end = time.monotonic() + seconds
        while True:
            with self._lock:  # between a job and what follows it there is no moment without either
                running = list((self._running | self._ending).values())
            if not running:
                return
            if time.monotonic() >= end:
                raise TimeoutError(f"still {running[0][0].text} after {seconds:.0f} s")
            running[0][1].join(max(0.0, end - time.monotonic()))

    def _run(self, job: Job, work: Callable[[Job], object], then: Callable[[], object]) -> None:
        torch.set_num_threads(self._threads)  # torch keeps this number for each thread
        ended_well = False
        try:
            work(job)
            ended_well = True
        except CancelledError:
            pass
        except Exception as error:  # a thread has nobody above it; the page says what happened
            text = " ".join(str(error).split()) or type(error).__name__
            self._failed(f"{job.kind} failed: {text}")
        with self._lock:  # from here on another of its kind can start
            self._ending[job.kind] = self._running.pop(job.kind)
        try:
            if ended_well and not job.stop.is_set():
                then()
        finally:
            with self._lock:
                if self._ending.get(job.kind, (None,))[0] is job:
                    del self._ending[job.kind]
