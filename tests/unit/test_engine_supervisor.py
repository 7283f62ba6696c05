"""The supervisor with a fake engine: a small process that does what the spec of a call says."""

import os
import queue
import select
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from tandem import wire
from tandem.config import Deployment, EngineConfig, EngineSettings
from tandem.errors import ConfigError
from tandem.metrics import Key, MetricsBuffer
from tandem.triton_backend.engine_supervisor import EngineSupervisor
from tandem.types import Role

PATIENCE_S = 10.0
FAKE_ENGINE = """
import os, sys, threading, time
import zmq
from tandem import wire
from tandem.config import EngineConfig
from tandem.types import Load, Role

size = int.from_bytes(sys.stdin.buffer.read(4), "little")
config = wire.decoder(EngineConfig).decode(sys.stdin.buffer.read(size))
threading.Thread(target=lambda: (os.read(0, 1), os._exit(9)), daemon=True).start()

scenario = config.deployment.model
starts = os.path.join(config.deployment.runtime_dir, "starts")
with open(starts, "a") as file:
    file.write(f"{os.getpid()}\\n")
num_starts = len(open(starts).readlines())
if scenario == "fails":
    sys.exit(3)
if scenario == "fails_later" and num_starts > 1:
    sys.exit(4)
socket = zmq.Context().socket(zmq.DEALER)
socket.connect(config.channel)
if scenario == "hangs":
    threading.Event().wait()

sending = threading.Lock()

def send(message):
    with sending:
        socket.send(wire.encode(message))

def stats(**totals):
    send(wire.Stats(load=Load(role=Role.DECODE, num_running=3, num_waiting_tokens=40),
                    blocks={"free": 5, "used": 2}, num_leases=1, totals=totals))

step_s = 0.0

def live():
    while True:
        send(wire.Alive(step_s=step_s))
        time.sleep(config.settings.engine_timeout_s / 5)

threading.Thread(target=live, daemon=True).start()
send(wire.Ready(incarnation="i", fingerprint="f", num_blocks=8, max_model_len=64, load_s=0.0))
held = []
while True:
    submit = wire.decoder(wire.Submit).decode(socket.recv())
    reply = wire.Reply(call_id=submit.call_id, result=submit.spec, handle=submit.handle)
    left = wire.Left(call_id=submit.call_id)
    if submit.spec == b"never answer":
        continue
    elif submit.spec == b"stay":
        held.append(left)
        send(reply)
        continue
    elif submit.spec == b"let all leave":
        for other in held:
            send(other)
    elif submit.spec == b"pid":
        reply = wire.Reply(call_id=submit.call_id, result=str(os.getpid()).encode())
    elif submit.spec == b"fail":
        reply = wire.Reply(call_id=submit.call_id, error="InvalidHandle", message="forged")
    elif submit.spec == b"answer twice":
        send(reply)
        reply = wire.Reply(call_id=submit.call_id, error="EngineFault", message="second")
    elif submit.spec == b"garbage":
        socket.send(b"\\xc1")
        socket.send(b"")
        send(wire.Reply(call_id=10**6, result=b"to nobody"))
        send(wire.Left(call_id=10**6))
    elif submit.spec == b"stats":
        stats(steps=5, preemptions=1, pulled_bytes=100, unknown_total=7)
        stats(steps=8, preemptions=1, pulled_bytes=300, unknown_total=9)
    elif submit.spec == b"get stuck":
        step_s = 1000.0
        continue
    elif submit.spec == b"die":
        os._exit(5)
    send(reply)
    send(left)
"""


class Clock:
    """Real enough: an engine has lived as long as the test says."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class Answers:
    """Takes the answers of any number of calls, in the order in which they come."""

    def __init__(self) -> None:
        self._replies: queue.Queue[wire.Reply] = queue.Queue()

    def __call__(self, reply: wire.Reply) -> None:
        self._replies.put(reply)

    def next(self) -> wire.Reply:
        return self._replies.get(timeout=PATIENCE_S)

    @property
    def is_empty(self) -> bool:
        return self._replies.empty()


class Setup:
    def __init__(
        self,
        directory: Path,
        scenario: str = "serves",
        has_siblings: bool = False,
        **settings: Any,
    ) -> None:
        self.directory = directory
        self.clock = Clock()
        self.metrics = MetricsBuffer()
        self.supervisor = EngineSupervisor(
            engine_config(directory, scenario, **settings),
            self.metrics,
            command=fake_engine(directory),
            clock=self.clock,
            has_siblings=has_siblings,
        )

    def submit(self, spec: bytes, answer: Any = None, handle: bytes = b"") -> Answers:
        answers = answer or Answers()
        self.supervisor.submit(spec, handle, answers)
        return answers

    def ask(self, spec: bytes, handle: bytes = b"") -> wire.Reply:
        return self.submit(spec, handle=handle).next()

    def engine_pid(self) -> int:
        return int(self.ask(b"pid").result)

    @property
    def num_starts(self) -> int:
        starts = self.directory / "starts"  # written by the engines, each as soon as it runs
        return len(starts.read_text().splitlines()) if starts.exists() else 0

    def kill_engine(self, *, after_s: float) -> wire.Reply:
        """The answer to a call that it had; by then its death is known. After a short life
        ``after_s`` the next start has to wait.
        """
        pid = self.engine_pid()
        lost = self.submit(b"never answer")
        self.clock.now_s += after_s
        os.kill(pid, signal.SIGKILL)
        reply = lost.next()
        assert lost.is_empty
        return reply


def fake_engine(directory: Path) -> list[str]:
    """The command that starts it."""
    script = directory / "fake_engine.py"
    script.write_text(FAKE_ENGINE)
    return [sys.executable, str(script)]


def engine_config(directory: Path, scenario: str, **settings: Any) -> EngineConfig:
    return EngineConfig(
        deployment=Deployment(model=scenario, runtime_dir=str(directory), secret=b"s"),
        settings=EngineSettings(**({"role": Role.DECODE, "max_num_seqs": 4} | settings)),
        worker="decode_0_0",
        device="cpu",
        channel=f"ipc://{directory}/e",
    )


def _has_ended(pid: int) -> bool:
    """Waits for the end of any process, also of one that is not our child."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    poller = select.poll()
    poller.register(pidfd, select.POLLIN)
    ended = bool(poller.poll(PATIENCE_S * 1000))
    os.close(pidfd)
    return ended


@pytest.fixture
def setup(tmp_path: Path) -> Iterator[Setup]:
    setup = Setup(tmp_path)
    setup.supervisor.start()
    yield setup
    setup.supervisor.stop()


def test_calls_are_carried_to_the_engine_and_back(setup: Setup) -> None:
    assert setup.metrics.drain()[1][Key("tandem_engine_up")] == 1
    for index in range(10):
        reply = setup.ask(b"spec %d" % index, handle=b"handle %d" % index)
        assert (reply.result, reply.handle) == (b"spec %d" % index, b"handle %d" % index)
        assert reply.error == ""
    failed = setup.ask(b"fail")
    assert (failed.error, failed.message) == ("InvalidHandle", "forged")
    assert setup.num_starts == 1

    # What an engine does wrong harms nobody.
    answers = setup.submit(b"answer twice")
    assert answers.next().error == ""
    assert setup.ask(b"garbage").result == b"garbage"
    assert answers.is_empty

    def refuses(reply: wire.Reply) -> None:
        raise RuntimeError("the client is gone")

    setup.submit(b"x", refuses)
    assert setup.ask(b"still here").result == b"still here"


def test_stats_become_metrics(setup: Setup) -> None:
    setup.ask(b"stats")
    counters, gauges, _ = setup.metrics.drain()
    assert gauges[Key("tandem_kv_blocks", "free")] == 5
    assert gauges[Key("tandem_kv_blocks", "used")] == 2
    assert gauges[Key("tandem_kv_leases")] == 1
    assert gauges[Key("tandem_running")] == 3
    assert gauges[Key("tandem_waiting_tokens")] == 40
    assert counters == {
        Key("tandem_steps_total"): 8,
        Key("tandem_preemptions_total"): 1,
        Key("tandem_transfer_bytes_total"): 300,
    }
    setup.kill_engine(after_s=100)
    setup.ask(b"stats")  # of the next incarnation, whose totals start again
    counters, _, _ = setup.metrics.drain()
    assert counters[Key("tandem_steps_total")] == 8
    assert counters[Key("tandem_engine_restarts_total")] == 1


def test_no_more_than_max_num_seqs_are_in_the_engine(setup: Setup) -> None:
    """An answered sequence keeps its place until it has left."""
    pid = setup.engine_pid()
    for _ in range(4):
        setup.ask(b"stay")
    fifth = Answers()
    has_submitted, has_room = threading.Event(), threading.Event()

    def submit() -> None:
        setup.supervisor.submit(b"fifth", b"", fifth)
        has_submitted.set()

    def wait_for_room() -> None:
        setup.supervisor.wait_for_room()
        has_room.set()

    threads = [threading.Thread(target=run, daemon=True) for run in (submit, wait_for_room)]
    for thread in threads:
        thread.start()
    assert not has_submitted.wait(0.05) and not has_room.is_set()
    setup.clock.now_s += 100
    os.kill(pid, signal.SIGKILL)
    assert fifth.next().result == b"fifth"
    assert has_submitted.wait(PATIENCE_S) and has_room.wait(PATIENCE_S)


def test_a_place_is_free_when_its_sequence_has_left(setup: Setup) -> None:
    for _ in range(3):
        setup.ask(b"stay")
    setup.ask(b"let all leave")
    for _ in range(4):
        setup.ask(b"stay")


def test_a_killed_engine_fails_its_calls_once_and_is_replaced(setup: Setup) -> None:
    other = setup.submit(b"never answer")
    answered = setup.submit(b"stay")
    assert answered.next().error == ""
    first_pid = setup.engine_pid()
    reply = setup.kill_engine(after_s=100)
    assert reply.error == "EngineDied" and "decode_0_0 exited with -9" in reply.message
    waited = [setup.submit(b"waited %d" % index) for index in range(4)]
    assert [a.next().result for a in waited] == [b"waited %d" % index for index in range(4)]
    assert setup.engine_pid() != first_pid
    assert other.next() == wire.Reply(call_id=1, error=reply.error, message=reply.message)
    assert other.is_empty and answered.is_empty
    counters, gauges, _ = setup.metrics.drain()
    assert counters[Key("tandem_engine_restarts_total")] == 1
    assert gauges[Key("tandem_engine_up")] == 1


def test_an_engine_that_ends_by_itself_is_replaced_too(setup: Setup) -> None:
    setup.clock.now_s += 100
    reply = setup.ask(b"die")
    assert reply.error == "EngineDied" and "exited with 5" in reply.message
    assert setup.ask(b"x").result == b"x"


def test_a_frozen_engine_is_replaced(tmp_path: Path) -> None:
    setup = Setup(tmp_path, engine_timeout_s=0.5)
    setup.supervisor.start()
    pid = setup.engine_pid()
    lost = setup.submit(b"never answer")
    setup.clock.now_s += 100
    os.kill(pid, signal.SIGSTOP)
    reply = lost.next()
    assert reply.error == "EngineDied" and "was silent for 0.5 s" in reply.message
    assert setup.engine_pid() != pid
    setup.supervisor.stop()


def test_an_engine_that_does_not_come_out_of_a_step_is_replaced(tmp_path: Path) -> None:
    setup = Setup(tmp_path, engine_timeout_s=0.5, step_timeout_s=60)
    setup.supervisor.start()
    pid = setup.engine_pid()
    setup.clock.now_s += 100
    reply = setup.ask(b"get stuck")
    assert reply.error == "EngineDied" and "more than 60 s in one step" in reply.message
    assert setup.engine_pid() != pid
    setup.supervisor.stop()


def test_the_orchestrators_hear_of_the_end_of_an_engine(tmp_path: Path) -> None:
    context = zmq.Context()
    plane = context.socket(zmq.ROUTER)
    plane.bind(f"ipc://{tmp_path}/stream-llm_0_0")
    (tmp_path / "stream-killed").touch()  # of an orchestrator that nobody hears any more
    setup = Setup(tmp_path)
    setup.supervisor.start()
    setup.kill_engine(after_s=100)
    assert plane.poll(PATIENCE_S * 1000)
    message = wire.decode_to_orchestrator(plane.recv_multipart()[-1])
    assert message == wire.EngineEnded(
        worker="decode_0_0", incarnation="i", reason="exited with -9"
    )
    setup.supervisor.stop()
    context.destroy(linger=0)


def test_stop_ends_the_engine_and_answers_everything(tmp_path: Path) -> None:
    setup = Setup(tmp_path)
    setup.supervisor.start()
    pid = setup.engine_pid()
    lost = setup.submit(b"never answer")
    setup.supervisor.stop()
    assert _has_ended(pid)
    assert lost.next().error == "EngineDied"
    late = setup.ask(b"too late")
    assert late.error == "Unavailable" and "shutting down" in late.message
    setup.supervisor.stop()
    setup.supervisor.wait_for_room()
    assert [path.name for path in tmp_path.glob("e-*")] == []


def test_stop_does_not_wait_for_the_next_start(tmp_path: Path) -> None:
    setup = Setup(tmp_path)
    setup.supervisor.start()
    assert setup.kill_engine(after_s=0).error == "EngineDied"
    waiting = setup.submit(b"waits for the next engine")
    setup.supervisor.stop()
    reply = waiting.next()
    assert reply.error == "Unavailable" and "shutting down" in reply.message
    assert setup.num_starts == 1


def test_what_waits_for_an_engine_that_does_not_come_up_is_answered(tmp_path: Path) -> None:
    setup = Setup(tmp_path, "fails_later")
    setup.supervisor.start()
    setup.kill_engine(after_s=100)
    assert "exited with 4, again" in setup.ask(b"x").message
    assert setup.num_starts == 2
    setup.supervisor.stop()


def test_calls_go_to_the_siblings_of_an_engine_that_restarts(tmp_path: Path) -> None:
    setup = Setup(tmp_path, has_siblings=True)
    setup.supervisor.start()
    setup.supervisor.wait_for_room()
    setup.kill_engine(after_s=100)
    refused = setup.ask(b"x")
    assert refused.error == "Unavailable" and "decode_0_0 is being restarted" in refused.message
    setup.supervisor.wait_for_room()  # takes no batch before the next engine is there
    assert setup.ask(b"y").result == b"y"
    setup.supervisor.stop()


@pytest.mark.parametrize(
    ("scenario", "settings", "problem"),
    [
        ("fails", {}, "decode_0_0: exited with 3 while starting"),
        ("hangs", {"start_timeout_s": 0.2}, "decode_0_0: was not ready after 0.2 s"),
    ],
)
def test_an_engine_that_cannot_start_stops_the_start(
    tmp_path: Path, scenario: str, settings: dict[str, Any], problem: str
) -> None:
    setup = Setup(tmp_path, scenario, **settings)
    with pytest.raises(ConfigError, match=problem):
        setup.supervisor.start()
    assert setup.num_starts <= 1
    setup.supervisor.stop()


@pytest.mark.parametrize(
    ("command", "channel"),
    [(["/no/such/program"], "ipc://{0}/e"), ([sys.executable], "ipc://{0}/no/such/folder/e")],
)
def test_what_cannot_be_started_at_all_stops_the_start(
    tmp_path: Path, command: list[str], channel: str
) -> None:
    config = engine_config(tmp_path, "serves")
    config = msgspec.structs.replace(config, channel=channel.format(tmp_path))
    supervisor = EngineSupervisor(config, MetricsBuffer(), command=command)
    with pytest.raises(ConfigError, match="could not be started: .*No such file"):
        supervisor.start()


def test_the_engine_dies_with_the_process_of_its_supervisor(tmp_path: Path) -> None:
    script = """
        import sys, threading
        from pathlib import Path
        from tandem.metrics import MetricsBuffer
        from tandem.triton_backend.engine_supervisor import EngineSupervisor
        from test_engine_supervisor import engine_config, fake_engine
        directory = Path(sys.argv[1])
        config, command = engine_config(directory, "serves"), fake_engine(directory)
        supervisor = EngineSupervisor(config, MetricsBuffer(), command)
        supervisor.start()
        supervisor.submit(b"pid", b"", lambda reply: print(int(reply.result), flush=True))
        threading.Event().wait()
    """
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script), str(tmp_path)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parent,
    )
    with process:
        assert process.stdout is not None
        try:
            engine_pid = int(process.stdout.readline())
        finally:
            process.kill()
    assert _has_ended(engine_pid)
