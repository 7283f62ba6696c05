import asyncio
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest

from tandem.config import OrchestratorSettings
from tandem.errors import (
    EngineDied,
    EngineFault,
    ErrorCode,
    FenceBroken,
    InvalidRequest,
    PullFailed,
    RequestCancelled,
    ShuttingDown,
    TandemError,
    Unavailable,
)
from tandem.metrics import Key, MetricsBuffer
from tandem.orchestrator.orchestrator import Orchestrator
from tandem.orchestrator.responder import Response, Usage
from tandem.orchestrator.sampling_defaults import SamplingDefaults
from tandem.orchestrator.stream_plane import TokenStream
from tandem.orchestrator.tokenizer import Tokenizer
from tandem.types import FinishReason, Load, Policy, Role, WorkerLoad
from tandem.wire import Admitted, Prefilled, PrefillReply, SequenceSpec, TokenEvent
from tiny_tokenizers import write_byte_level

PATIENCE_S = 5.0
TEXT = "abcdefghijklmnop"  # what the fake engines generate, whatever the prompt
HANDLE = b"a signed handle"
T = TypeVar("T")


async def soon(awaitable: Awaitable[T]) -> T:
    return await asyncio.wait_for(awaitable, PATIENCE_S)


class StubPlane:
    """The public interface of the stream plane, without sockets."""

    reply_to = "llm_0_0"

    def __init__(self) -> None:
        self.workers: list[WorkerLoad] = []
        self.loads: list[Load] = []
        self.streams: dict[str, TokenStream] = {}
        self.closed: list[tuple[str, bool]] = []
        self.kept: list[str] = []
        self.admissions: list[tuple[str, str, str]] = []

    def open(self, sequence_id: str) -> TokenStream:
        assert sequence_id not in self.streams
        stream = self.streams[sequence_id] = TokenStream(sequence_id)
        return stream

    def close(self, stream: TokenStream, *, cancel: bool) -> None:
        self.closed.append((stream.sequence_id, cancel))

    def keep_lease(self, stream: TokenStream) -> None:
        self.kept.append(stream.sequence_id)

    def admitted(self, stream: TokenStream, worker_name: str, incarnation: str) -> None:
        self.admissions.append((stream.sequence_id, worker_name, incarnation))


@dataclass
class Tokens:
    """What a decode engine does: so many tokens (or all), and then perhaps an error."""

    count: int = 1000
    then: TandemError | None = None


@dataclass
class Hang:
    """A call that does not return; ``reached`` says when it hangs."""

    reached: asyncio.Event = field(default_factory=asyncio.Event)


class FakeLink:
    """Both pools. Scripted with one step a call; by default everything goes well."""

    def __init__(self, plane: StubPlane, id_of: Callable[[str], int]) -> None:
        self.plane = plane
        self.id_of = id_of
        self.prefill_script: list[TandemError | Hang] = []
        self.decode_script: list[BaseException | Hang | Tokens] = []
        self.prefills: list[SequenceSpec] = []
        self.decodes: list[tuple[SequenceSpec, bytes]] = []

    def token(self, spec: SequenceSpec, position: int) -> TokenEvent:
        is_last = position + 1 == spec.sampling.max_tokens
        return TokenEvent(
            spec.sequence_id,
            position,
            self.id_of(TEXT[position]),
            None,
            FinishReason.LENGTH if is_last else None,
        )

    async def _pass(self, step: object) -> None:
        if isinstance(step, Hang):
            step.reached.set()
            await asyncio.Event().wait()
        if isinstance(step, BaseException):
            raise step
        await asyncio.sleep(0)

    async def prefill(self, spec: SequenceSpec, worker: str | None) -> tuple[PrefillReply, bytes]:
        self.prefills.append(spec)
        await self._pass(self.prefill_script.pop(0) if self.prefill_script else None)
        token = self.token(spec, len(spec.output_ids))
        reply = PrefillReply(
            worker="prefill_0_0", token=token, num_cached_tokens=0, queue_s=0.0, prefill_s=0.0
        )
        return reply, b"" if token.finish_reason else HANDLE

    async def decode(
        self, spec: SequenceSpec, handle: bytes, worker: str | None
    ) -> Admitted:
        self.decodes.append((spec, handle))
        step = self.decode_script.pop(0) if self.decode_script else Tokens()
        await self._pass(step)
        assert isinstance(step, Tokens)
        stream = self.plane.streams[spec.sequence_id]
        if not handle:
            stream.put(
                Prefilled(sequence_id=spec.sequence_id, num_cached_tokens=0, queue_s=0, prefill_s=0)
            )
        first = len(spec.output_ids)
        for position in range(first, min(first + step.count, spec.sampling.max_tokens)):
            stream.put(self.token(spec, position))
        if step.then is not None:
            stream.put(step.then)
        return Admitted(worker="decode_0_0", incarnation="aa")


class FakeResponder:
    def __init__(self) -> None:
        self.pieces: list[str] = []
        self.usage: Usage | None = None
        self.errors: list[TandemError] = []
        self.first_piece = asyncio.Event()

    def send(self, response: Response) -> None:
        assert not self.is_over
        self.pieces.append(response.text)
        self.first_piece.set()

    def send_final(self, response: Response, usage: Usage) -> None:
        assert not self.is_over
        self.pieces.append(response.text)
        self.usage = usage

    def fail(self, error: TandemError) -> None:
        assert not self.is_over
        self.errors.append(error)

    def is_cancelled(self) -> bool:
        return False

    @property
    def is_over(self) -> bool:
        return self.usage is not None or bool(self.errors)

    @property
    def text(self) -> str:
        return "".join(self.pieces)


class Setup:
    def __init__(self, tokenizer: Any, **settings: Any) -> None:
        self.plane = StubPlane()
        self.metrics = MetricsBuffer()
        self.link = FakeLink(self.plane, lambda piece: int(tokenizer.encode(piece)[0]))
        self.orchestrator = Orchestrator(
            settings=OrchestratorSettings(**({"policy": Policy.ALWAYS} | settings)),
            vocab_size=tokenizer.vocab_size,
            tokenizer=tokenizer,
            defaults=SamplingDefaults(),
            link=self.link,
            plane=self.plane,  # type: ignore[arg-type]
            metrics=self.metrics,
            draw_seed=lambda: 4,
        )

    def start(self, **fields: Any) -> tuple[asyncio.Task[None], FakeResponder]:
        responder = FakeResponder()
        values = {"max_tokens": 5} | fields
        prompt = np.array([values.pop("text", "hi").encode()], dtype=np.object_)
        serving = self.orchestrator.serve({"text_input": prompt}, values, responder)
        return asyncio.create_task(serving), responder

    async def serve(self, **fields: Any) -> FakeResponder:
        task, responder = self.start(**fields)
        await soon(task)
        return responder

    @property
    def num_live(self) -> float:
        return self.metrics.drain()[1][Key("tandem_requests_live")]

    def counters(self) -> dict[Key, float]:
        return self.metrics.drain()[0]


MakeSetup = Callable[..., Setup]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    directory: Path = tmp_path_factory.mktemp("tokenizer")
    write_byte_level(directory)
    return Tokenizer(directory)


@pytest.fixture
async def make(tokenizer: Tokenizer) -> AsyncIterator[MakeSetup]:
    made: list[Setup] = []

    def make(with_tokenizer: Any = tokenizer, **settings: Any) -> Setup:
        made.append(Setup(with_tokenizer, **settings))
        return made[-1]

    yield make
    for setup in made:
        setup.orchestrator.close()


# ---- the two paths ---------------------------------------------------------------------------


async def test_remote_prefill_then_decode(make: MakeSetup, tokenizer: Tokenizer) -> None:
    setup = make()
    responder = await setup.serve()
    assert responder.text == "abcde" and responder.errors == []
    assert responder.usage is not None and responder.usage.timings is not None
    assert responder.usage.timings["path"] == "remote"
    assert responder.usage.timings["prefill_worker"] == "prefill_0_0"
    (prefill,), ((decode, handle),) = setup.link.prefills, setup.link.decodes
    assert prefill.prompt_ids == decode.prompt_ids == tuple(tokenizer.encode("hi"))
    assert prefill.output_ids == () and decode.output_ids == tuple(tokenizer.encode("a"))
    assert prefill.sequence_id == decode.sequence_id
    assert prefill.reply_to == decode.reply_to == "llm_0_0"
    assert prefill.sampling == decode.sampling and prefill.sampling.seed == 4
    assert handle == HANDLE
    assert setup.plane.kept == [prefill.sequence_id]
    assert setup.plane.admissions == [(prefill.sequence_id, "decode_0_0", "aa")]
    assert setup.plane.closed == [(prefill.sequence_id, False)]
    counters = setup.counters()
    assert counters[Key("tandem_path_total", "remote")] == 1
    assert counters[Key("tandem_requests_total", "length")] == 1
    assert Key("tandem_reprefills_total") not in counters


async def test_local_prefill(make: MakeSetup) -> None:
    setup = make(policy=Policy.NEVER)
    responder = await setup.serve()
    assert responder.text == "abcde"
    assert responder.usage is not None and responder.usage.timings is not None
    assert responder.usage.timings["path"] == "local"
    assert responder.usage.timings["prefill_worker"] == "decode_0_0"
    assert setup.link.prefills == []
    ((spec, handle),) = setup.link.decodes
    assert (spec.output_ids, handle) == ((), b"")
    assert setup.plane.closed == [(spec.sequence_id, False)]


def _worker(role: Role, tokens_per_s: float, **load: float) -> WorkerLoad:
    changes: dict[str, Any] = load
    load_ = Load(role=role, num_blocks=99, prefill_tokens_per_s=tokens_per_s, **changes)
    return WorkerLoad(f"{role}_0_0", "aa", load_, time.monotonic())


async def test_policy_length_goes_by_what_no_worker_has_cached(make: MakeSetup) -> None:
    setup = make(policy=Policy.LENGTH, remote_prefill_min_tokens=20, block_size=4)
    setup.plane.workers = [_worker(Role.PREFILL, 1000), _worker(Role.DECODE, 1000)]
    await setup.serve(text="x" * 30)
    await setup.serve(text="x" * 30)
    await setup.serve(text="y" * 30)
    await setup.serve(text="z")
    assert len(setup.link.prefills) == 2
    assert [bool(handle) for _, handle in setup.link.decodes] == [True, False, True, False]


@pytest.mark.parametrize(("waiting", "num_prefills"), [(10**6, 0), (0, 1)])
async def test_auto_takes_the_path_that_is_expected_to_be_faster(
    make: MakeSetup, waiting: int, num_prefills: int
) -> None:
    setup = make(policy=Policy.AUTO)
    setup.plane.workers = [
        _worker(Role.PREFILL, 1000, num_waiting_tokens=waiting),
        _worker(Role.DECODE, 1000, num_waiting_tokens=100),
    ]
    await setup.serve()
    assert len(setup.link.prefills) == num_prefills
    counters, _, observations = setup.metrics.drain()
    path = "remote" if num_prefills else "local"
    assert counters[Key("tandem_path_total", path)] == 1
    assert [key for key, _ in observations if key.name == "tandem_route_error_seconds"] == [
        Key("tandem_route_error_seconds", path)
    ]


async def test_a_failed_attempt_leaves_no_work_behind(make: MakeSetup) -> None:
    """Or the router would think its worker busy for ever."""
    setup = make(policy=Policy.AUTO, max_attempts=2)
    setup.plane.workers = [_worker(Role.PREFILL, 1000), _worker(Role.DECODE, 100)]
    setup.link.prefill_script = [EngineFault("broken")] * 2
    await setup.serve(text="x" * 1000)
    await setup.serve(text="y")
    assert len(setup.link.prefills) == 3, "the prefill worker is free, and faster"


async def test_the_first_token_may_be_the_last(make: MakeSetup) -> None:
    setup = make()
    responder = await setup.serve(max_tokens=1)
    assert responder.text == "a" and setup.link.decodes == []
    assert [cancel for _, cancel in setup.plane.closed] == [False], "the engine ended it itself"


async def test_a_stop_string_in_the_first_token_gives_the_lease_back(make: MakeSetup) -> None:
    setup = make()
    responder = await setup.serve(stop="a")
    assert responder.text == "" and setup.link.decodes == []
    assert [cancel for _, cancel in setup.plane.closed] == [True]


async def test_a_stop_string_ends_the_sequence_at_the_engine(make: MakeSetup) -> None:
    setup = make()
    responder = await setup.serve(stop="c")
    assert responder.text == "ab"
    assert [cancel for _, cancel in setup.plane.closed] == [True]


async def test_streaming_sends_each_token(make: MakeSetup) -> None:
    responder = await make().serve(stream=True)
    assert responder.pieces == ["a", "b", "c", "d", "e"]


async def test_messages_are_tokenized_with_the_chat_template(
    make: MakeSetup, tokenizer: Tokenizer
) -> None:
    setup = make()
    messages = np.array([b'[{"role": "user", "content": "hi"}]'], dtype=np.object_)
    responder = FakeResponder()
    await soon(setup.orchestrator.serve({"messages": messages}, {"max_tokens": 2}, responder))
    assert responder.text == "ab"
    expected = tokenizer.encode_chat([{"role": "user", "content": "hi"}])
    assert setup.link.prefills[0].prompt_ids == tuple(expected)


async def test_token_ids_are_taken_as_they_are(make: MakeSetup) -> None:
    setup = make()
    ids = np.array([5, 6, 7], dtype=np.int32)
    await soon(setup.orchestrator.serve({"input_ids": ids}, {"max_tokens": 1}, FakeResponder()))
    assert setup.link.prefills[0].prompt_ids == (5, 6, 7)


async def test_the_input_is_shown_where_asked_for(make: MakeSetup) -> None:
    responder = await make().serve(exclude_input_in_output=False, stream=True)
    assert responder.text == "hiabcde"


# ---- refused ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 5000}, "max_tokens"),
        ({"unknown": 1}, "unknown"),
        ({"temperature": "hot"}, "temperature"),
        ({"stop_token_ids": 10**6}, "stop_token_ids"),
        ({"text": "x" * 3000}, "text_input"),
    ],
)
async def test_a_bad_request_is_refused_before_anything_is_opened(
    make: MakeSetup, fields: dict[str, Any], named: str
) -> None:
    setup = make()
    responder = await setup.serve(**fields)
    (error,) = responder.errors
    assert isinstance(error, InvalidRequest) and error.field == named
    assert setup.plane.streams == {} and setup.link.prefills == []
    assert setup.counters()[Key("tandem_requests_total", "INVALID_ARG")] == 1


async def test_a_full_queue_refuses_at_once(make: MakeSetup) -> None:
    setup = make(max_queued_requests=2)
    hangs = [Hang() for _ in range(4)]
    setup.link.prefill_script = [*hangs]
    tasks = []
    for hang in hangs:  # so many are let in though decode was not heard of yet
        tasks.append(setup.start()[0])
        await soon(hang.reached.wait())
    tasks += [setup.start()[0] for _ in range(2)]
    await asyncio.sleep(0)
    responder = await setup.serve()
    (error,) = responder.errors
    assert isinstance(error, Unavailable) and "2 requests wait" in str(error)
    assert "retry after" in str(error)
    assert setup.counters()[Key("tandem_requests_total", "UNAVAILABLE")] == 1
    for task in tasks:
        task.cancel()
        await soon(task)
    assert setup.num_live == 0
    assert (await setup.serve()).text == "abcde"


async def test_a_request_waits_for_room_at_decode(make: MakeSetup) -> None:
    setup = make()
    hangs = [Hang() for _ in range(4)]
    setup.link.prefill_script = [*hangs]
    tasks = [setup.start()[0] for _ in hangs]
    for hang in hangs:
        await soon(hang.reached.wait())
    waiting, responder = setup.start()
    low, low_responder = setup.start(priority=1)
    for _ in range(10):
        await asyncio.sleep(0)
    assert len(setup.plane.streams) == 4
    tasks[0].cancel()
    await soon(waiting)
    assert responder.text == "abcde"
    await soon(low)
    assert low_responder.text == "abcde", "the place was given on"
    for task in tasks:
        task.cancel()
        await soon(task)


class JumpingTime:
    """The time of the running loop, which a test moves."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._now: Callable[[], float] = self._loop.time
        self._offset_s = 0.0
        self._loop.time = lambda: self._now() + self._offset_s  # type: ignore[method-assign]

    def jump(self, seconds: float) -> None:
        self._offset_s += seconds
        self._loop.call_soon(lambda: None)  # wakes it


@pytest.mark.parametrize("stage", ["queue", "prefill", "decode"])
async def test_a_timeout_before_the_first_token_is_an_error(make: MakeSetup, stage: str) -> None:
    time = JumpingTime()
    setup = make(policy=Policy.NEVER if stage == "decode" else Policy.ALWAYS)
    hangs = [Hang() for _ in range(5)]
    setup.link.prefill_script = [*hangs]
    setup.link.decode_script = [*hangs]
    num_before = 4 if stage == "queue" else 0
    before = [setup.start()[0] for _ in range(num_before)]
    for hang in hangs[:num_before]:
        await soon(hang.reached.wait())
    task, responder = setup.start(timeout=3_600_000_000)
    if stage == "queue":
        await asyncio.sleep(0)
    else:
        await soon(hangs[0].reached.wait())
    assert not task.done()
    time.jump(4000)
    await asyncio.wait_for(task, 5)
    (error,) = responder.errors
    assert isinstance(error, Unavailable)
    assert "no token within its timeout of 3600000000 µs" in str(error)
    closed = [cancel for _, cancel in setup.plane.closed]
    assert closed == ([] if stage == "queue" else [True]), "what the engines hold is dropped"
    for waiting in before:
        waiting.cancel()
        await soon(waiting)
    assert setup.num_live == 0


@pytest.mark.parametrize("stream", [True, False])
async def test_a_timeout_ends_the_output_with_what_there_is(make: MakeSetup, stream: bool) -> None:
    time = JumpingTime()
    setup = make()
    setup.link.decode_script = [Tokens(2)]
    task, responder = setup.start(stream=stream, timeout=3_600_000_000)
    async with asyncio.timeout(PATIENCE_S):
        while not setup.plane.admissions:
            await asyncio.sleep(0)
    for _ in range(10):
        await asyncio.sleep(0)  # for the three tokens to be taken
    assert not task.done()
    time.jump(4000)
    await asyncio.wait_for(task, 5)
    assert responder.errors == [] and responder.text == "abc"
    assert responder.usage is not None and responder.usage.finish_reason == "timeout"
    assert responder.usage.num_output_tokens == 3
    assert [cancel for _, cancel in setup.plane.closed] == [True]
    assert setup.counters()[Key("tandem_requests_total", "timeout")] == 1


async def test_a_timeout_that_is_kept_changes_nothing(make: MakeSetup) -> None:
    responder = await make().serve(timeout=60_000_000)
    assert responder.text == "abcde" and responder.errors == []


async def test_the_salt_goes_to_the_engines_and_to_the_guess_of_what_they_have(
    make: MakeSetup,
) -> None:
    setup = make(policy=Policy.LENGTH, remote_prefill_min_tokens=20, block_size=4)
    setup.plane.workers = [_worker(Role.PREFILL, 1000), _worker(Role.DECODE, 1000)]
    for salt in ({"cache_salt": "a"}, {"cache_salt": "a"}, {"cache_salt": "b"}, {}, {}):
        await setup.serve(text="x" * 30, **salt)
    assert [spec.cache_salt for spec in setup.link.prefills] == ["a", "b", ""]
    assert [spec.cache_salt for spec, _ in setup.link.decodes] == ["a", "a", "b", "", ""]


# ---- failures --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "error",
    [
        Unavailable("no such model"),
        EngineDied("exited"),
        PullFailed("the wire broke"),
        FenceBroken("the lease has ended"),
        EngineFault("out of memory"),
    ],
    ids=lambda error: type(error).__name__,
)
@pytest.mark.parametrize("where", ["prefill", "decode", "stream"])
async def test_a_failed_attempt_is_repeated(
    make: MakeSetup, error: TandemError, where: str
) -> None:
    setup = make()
    if where == "prefill":
        setup.link.prefill_script = [error]
    else:
        setup.link.decode_script = [error if where == "decode" else Tokens(2, then=error)]
    responder = await setup.serve(stream=True)
    assert responder.errors == [] and responder.text == "abcde"
    assert responder.usage is not None and responder.usage.timings is not None
    assert responder.usage.timings["retries"] == 1
    (first, was_cancelled), (second, again) = setup.plane.closed
    assert (was_cancelled, again) == (True, False)
    assert first != second and first.split(".")[0] == second.split(".")[0]
    assert setup.counters()[Key("tandem_reprefills_total")] == 1


async def test_a_refused_handle_is_prefilled_again(make: MakeSetup) -> None:
    """A link reports it as Unavailable, since the user has done nothing wrong."""
    setup = make()
    setup.link.decode_script = [Unavailable("the KV handle was refused: expired")]
    assert (await setup.serve()).text == "abcde"
    assert len(setup.link.prefills) == 2
    assert setup.link.prefills[1].output_ids == setup.link.decodes[0][0].output_ids


async def test_the_next_attempt_goes_on_after_what_was_sent(
    make: MakeSetup, tokenizer: Tokenizer
) -> None:
    setup = make()
    setup.link.decode_script = [Tokens(2, then=EngineDied("lost"))]
    responder = await setup.serve(stream=True, max_tokens=6)
    assert responder.pieces == ["a", "b", "c", "d", "e", "f"]
    assert setup.link.prefills[1].output_ids == tuple(map(setup.link.id_of, "abc"))
    assert setup.link.decodes[1][0].output_ids == tuple(map(setup.link.id_of, "abcd"))
    assert responder.usage is not None and responder.usage.num_output_tokens == 6


async def test_it_goes_on_locally_too(make: MakeSetup) -> None:
    setup = make(policy=Policy.NEVER)
    setup.link.decode_script = [Tokens(3, then=EngineDied("lost")), Unavailable("still down")]
    responder = await setup.serve(stream=True)
    assert responder.text == "abcde"
    assert [len(spec.output_ids) for spec, _ in setup.link.decodes] == [0, 3, 3]


async def test_a_gap_is_repeated_from_the_last_good_token(make: MakeSetup) -> None:
    setup = make()
    setup.link.decode_script = [Tokens(0)]
    task, responder = setup.start(stream=True)
    await soon(responder.first_piece.wait())
    (stream,) = setup.plane.streams.values()
    spec = setup.link.prefills[0]
    stream.put(setup.link.token(spec, 3))
    await soon(task)
    assert responder.text == "abcde"


async def test_attempts_are_bounded(make: MakeSetup) -> None:
    setup = make(max_attempts=2)
    setup.link.prefill_script = [Unavailable(f"down {i}") for i in range(9)]
    responder = await setup.serve()
    (error,) = responder.errors
    assert error.code is ErrorCode.UNAVAILABLE and "down 1" in str(error)
    assert len(setup.link.prefills) == 2
    assert [cancel for _, cancel in setup.plane.closed] == [True] * 2
    counters = setup.counters()
    assert counters[Key("tandem_requests_total", "UNAVAILABLE")] == 1
    assert counters[Key("tandem_reprefills_total")] == 1


async def test_a_new_token_forgives_what_was_before(make: MakeSetup) -> None:
    setup = make(max_attempts=2, policy=Policy.NEVER)
    setup.link.decode_script = [Tokens(1, then=EngineDied("killed")) for _ in range(9)]
    responder = await setup.serve(max_tokens=9)
    assert responder.errors == [] and responder.text == TEXT[:9]
    assert len(setup.link.decodes) == 9


async def test_a_request_that_kills_engines_is_given_up(make: MakeSetup) -> None:
    setup = make()
    setup.link.prefill_script = [EngineDied(f"engine {i} exited with -11") for i in range(9)]
    responder = await setup.serve()
    (error,) = responder.errors
    assert error.code is ErrorCode.INTERNAL
    assert "2 engines died" in str(error) and "engine 1 exited with -11" in str(error)
    assert len(setup.link.prefills) == 2
    assert (await setup.serve()).errors, "the script goes on"
    setup.link.prefill_script.clear()
    assert (await setup.serve()).text == "abcde"


async def test_what_an_engine_died_under_is_placed_alone(make: MakeSetup) -> None:
    setup = make(policy=Policy.NEVER)
    hang = Hang()
    setup.link.decode_script = [Tokens(1), Tokens(1), Tokens(1), hang]
    started = [setup.start(stream=True) for _ in range(3)]
    for _, responder in started:
        await soon(responder.first_piece.wait())
    for stream in list(setup.plane.streams.values()):
        stream.put(EngineDied("killed"))
    await soon(hang.reached.wait())
    assert (await setup.serve()).text == "abcde", "a request that is above suspicion waits for none"
    assert len(setup.link.decodes) == 5, "the two others wait until the first has a token"
    started[0][0].cancel()
    await soon(asyncio.gather(*(task for task, _ in started), return_exceptions=True))
    assert [responder.text for _, responder in started] == ["a", "abcde", "abcde"]


async def test_a_fault_of_the_user_is_not_repeated(make: MakeSetup) -> None:
    setup = make()
    setup.link.decode_script = [InvalidRequest("prompt_ids", "too long")]
    responder = await setup.serve()
    assert [type(error) for error in responder.errors] == [InvalidRequest]
    assert len(setup.link.prefills) == 1
    assert [cancel for _, cancel in setup.plane.closed] == [True]


async def test_an_unexpected_exception_is_internal(
    make: MakeSetup, caplog: pytest.LogCaptureFixture
) -> None:
    setup = make()
    setup.link.decode_script = [ZeroDivisionError("a bug")]
    responder = await setup.serve()
    (error,) = responder.errors
    assert error.code is ErrorCode.INTERNAL and "ZeroDivisionError: a bug" in str(error)
    assert "Traceback" in caplog.text
    assert [cancel for _, cancel in setup.plane.closed] == [True]
    assert setup.num_live == 0


# ---- cancelled -------------------------------------------------------------------------------


class SlowTokenizer:
    """Tokenizes when it is told to."""

    def __init__(self, inner: Tokenizer) -> None:
        self.inner = inner
        self.vocab_size = inner.vocab_size
        self.reached = asyncio.Event()
        self.may_go_on = threading.Event()
        self.loop = asyncio.get_running_loop()

    def encode(self, text: str) -> list[int]:
        if text == "hi":
            self.loop.call_soon_threadsafe(self.reached.set)
            assert self.may_go_on.wait(PATIENCE_S)
        return self.inner.encode(text)


async def _cancelled(task: asyncio.Task[None], responder: FakeResponder) -> None:
    task.cancel()
    await soon(task)
    assert [type(error) for error in responder.errors] == [RequestCancelled]


async def test_cancel_while_tokenizing(make: MakeSetup, tokenizer: Tokenizer) -> None:
    slow = SlowTokenizer(tokenizer)
    setup = make(slow)
    task, responder = setup.start()
    await soon(slow.reached.wait())
    await _cancelled(task, responder)
    slow.may_go_on.set()
    assert setup.plane.streams == {} and setup.link.prefills == []
    assert setup.num_live == 0


@pytest.mark.parametrize("stage", ["prefill", "decode", "local"])
async def test_cancel_during_a_call(make: MakeSetup, stage: str) -> None:
    setup = make(policy=Policy.NEVER if stage == "local" else Policy.ALWAYS)
    hang = Hang()
    if stage == "prefill":
        setup.link.prefill_script = [hang]
    else:
        setup.link.decode_script = [hang]
    task, responder = setup.start()
    await soon(hang.reached.wait())
    await _cancelled(task, responder)
    assert setup.plane.closed == [(sequence_id, True) for sequence_id in setup.plane.streams]
    assert len(setup.plane.closed) == 1
    assert setup.counters()[Key("tandem_requests_total", "cancelled")] == 1


async def test_cancel_while_streaming(make: MakeSetup) -> None:
    setup = make()
    setup.link.decode_script = [Tokens(2)]
    task, responder = setup.start(stream=True)
    await soon(responder.first_piece.wait())
    await _cancelled(task, responder)
    assert "abc".startswith(responder.text)
    assert [cancel for _, cancel in setup.plane.closed] == [True]
    assert setup.num_live == 0


async def test_cancel_while_waiting_for_a_place(make: MakeSetup) -> None:
    setup = make(max_calls_in_flight=1)
    hang = Hang()
    setup.link.prefill_script = [hang]
    first, first_responder = setup.start()
    await soon(hang.reached.wait())
    second, second_responder = setup.start()
    while len(setup.plane.streams) < 2:
        await asyncio.sleep(0)
    await _cancelled(second, second_responder)
    await _cancelled(first, first_responder)
    assert [cancel for _, cancel in setup.plane.closed] == [True, True]
    assert (await setup.serve()).text == "abcde", "the places were given back"


async def test_a_draining_orchestrator_refuses_and_tells_who_is_cancelled(make: MakeSetup) -> None:
    setup = make()
    setup.link.decode_script = [Tokens(2)]
    running, responder = setup.start(stream=True)
    await soon(responder.first_piece.wait())
    setup.orchestrator.drain()
    (refused,) = (await setup.serve()).errors
    assert isinstance(refused, ShuttingDown) and "draining" in str(refused)
    running.cancel()
    await soon(running)
    (error,) = responder.errors
    assert error.code is ErrorCode.UNAVAILABLE and "the server is stopping" in str(error)
    assert [cancel for _, cancel in setup.plane.closed] == [True]


async def test_a_server_that_stops_is_not_tried_again(make: MakeSetup) -> None:
    setup = make()
    setup.link.decode_script = [ShuttingDown("the server is stopping")]
    responder = await setup.serve()
    assert [str(error) for error in responder.errors] == ["the server is stopping"]
    assert len(setup.link.decodes) == 1


async def test_a_probe_takes_the_path_it_names(make: MakeSetup) -> None:
    setup = make(policy=Policy.ALWAYS)
    await setup.serve(tandem_path="local")
    assert setup.link.prefills == []
    setup = make(policy=Policy.NEVER)
    await setup.serve(tandem_path="remote")
    assert len(setup.link.prefills) == 1
    (error,) = (await setup.serve(tandem_path="nowhere")).errors
    assert str(error) == "tandem_path: must be remote or local; got 'nowhere'"


async def test_cancel_in_the_second_attempt_cancels_both_sequences_once(make: MakeSetup) -> None:
    setup = make()
    hang = Hang()
    setup.link.decode_script = [EngineDied("lost"), hang]
    task, responder = setup.start()
    await soon(hang.reached.wait())
    await _cancelled(task, responder)
    assert setup.plane.closed == [(sequence_id, True) for sequence_id in setup.plane.streams]
    assert len(setup.plane.closed) == 2


async def test_a_cancel_after_the_end_changes_nothing(make: MakeSetup) -> None:
    setup = make()
    task, responder = setup.start()
    await soon(task)
    assert not task.cancel()
    assert responder.errors == [] and responder.usage is not None
