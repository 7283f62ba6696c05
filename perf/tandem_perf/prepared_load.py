"""The requests of a run, made before it starts."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import takewhile

from tandem_perf.arrivals import ClosedLoop
from tandem_perf.prompt_text import PromptText
from tandem_perf.requests import RequestDigest, Session, first_requests
from tandem_perf.run_config import RunConfig
from tandem_perf.workloads.base import Workload, WorkloadError
from tandem_perf.workloads.registry import is_file, load_workload, warm_up_workload

DEFAULT_NUM_REQUESTS = 60
_WARM_UP_SEED_OFFSET = 1_000_003  # other prompts than the run's, so that no cache holds those


class PreparedLoad:
    """What is going to be sent. Open loops are complete before the run: nothing is made late."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self._text = PromptText(config.tokenizer) if config.tokenizer else None
        self.workload: Workload = load_workload(config.workload, config.workload_options)
        self.digest = RequestDigest()
        arrivals = config.arrivals
        wanted = self._wanted_sessions()
        self.sessions: Iterator[Session] = iter(())
        self.schedule: list[tuple[float, Session]] = []
        if not isinstance(arrivals, ClosedLoop):
            duration_s = config.duration_s or float("inf")
            timed = arrivals.schedule(wanted, config.seed)
            self.schedule = list(takewhile(lambda pair: pair[0] < duration_s, timed))
            list(self.digest.watch(session for _, session in self.schedule))
            num_requests = sum(len(session.requests) for _, session in self.schedule)
            self.num_requests: int | None = num_requests
        elif self._is_endless:  # made as users ask for them
            self.sessions = self.digest.watch(wanted)
            self.num_requests = None
        else:
            whole = list(self.digest.watch(wanted))
            self.sessions = iter(whole)
            self.num_requests = sum(len(session.requests) for session in whole)
        if self.num_requests == 0:
            raise WorkloadError(f"workload {self.workload.name}: no requests to send")

    def warm_up_sessions(self) -> list[Session]:
        workload = warm_up_workload(self.workload, self._config.workload_options)
        sessions = workload.sessions(self._config.seed + _WARM_UP_SEED_OFFSET)
        return list(self._as_sent(first_requests(sessions, self._config.warm_up)))

    @property
    def _is_endless(self) -> bool:
        return self._num_requests is None and not is_file(self._config.workload)

    @property
    def _num_requests(self) -> int | None:
        config = self._config
        if config.num_requests is None and config.duration_s is None:
            return None if is_file(config.workload) else DEFAULT_NUM_REQUESTS
        return config.num_requests

    def _wanted_sessions(self) -> Iterator[Session]:
        sessions = self.workload.sessions(self._config.seed)
        if self._num_requests is not None:
            sessions = first_requests(sessions, self._num_requests)
        return self._as_sent(sessions)

    def _as_sent(self, sessions: Iterator[Session]) -> Iterator[Session]:
        return sessions if self._text is None else self._text.sessions(sessions)
