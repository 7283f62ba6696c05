from pathlib import Path
from typing import Any

import pytest

from tandem.errors import EngineFault, TandemError
from tandem.metrics import Key, MetricsBuffer
from tandem.orchestrator.generate_request import GenerateRequest
from tandem.orchestrator.generation import Generation
from tandem.orchestrator.responder import Response, Usage
from tandem.orchestrator.text_assembler import TextAssembler
from tandem.orchestrator.tokenizer import Tokenizer
from tandem.types import FinishReason, SamplingParams
from tandem.wire import Admitted, Prefilled, PrefillReply, TokenEvent
from tiny_tokenizers import write_byte_level

PROMPT = (1, 2, 3)
STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH


class Clock:
    def __init__(self) -> None:
        self.now_s = 10.0

    def __call__(self) -> float:
        return self.now_s


class FakeResponder:
    """Refuses whatever breaks the order: pieces, then exactly one end."""

    def __init__(self) -> None:
        self.pieces: list[Response] = []
        self.final: Response | None = None
        self.usage: Usage | None = None

    def send(self, response: Response) -> None:
        assert self.final is None
        self.pieces.append(response)

    def send_final(self, response: Response, usage: Usage) -> None:
        assert self.final is None
        self.final, self.usage = response, usage

    def fail(self, error: TandemError) -> None:
        raise AssertionError(error)

    def is_cancelled(self) -> bool:
        return False

    @property
    def texts(self) -> list[str]:
        """Of all responses, the final one included."""
        return [r.text for r in [*self.pieces, *([self.final] if self.final else [])]]


class Run:
    """A generation whose tokens are given as text, one piece each."""

    def __init__(self, tokenizer: Tokenizer, **request: Any) -> None:
        input_text = request.pop("input_text", "")
        self.tokenizer = tokenizer
        self.clock = Clock()
        self.metrics = MetricsBuffer()
        self.responder = FakeResponder()
        wanted = GenerateRequest(text_input="abc", **request)
        self.generation = Generation(
            request=wanted,
            prompt_ids=PROMPT,
            sampling=SamplingParams(max_tokens=100),
            assembler=TextAssembler(tokenizer, wanted.stop),
            responder=self.responder,
            metrics=self.metrics,
            clock=self.clock,
            arrived_s=self.clock.now_s,
            input_text=input_text,
        )

    def id_of(self, piece: str) -> int:
        (token_id,) = self.tokenizer.encode(piece)
        return token_id

    def take(
        self,
        piece: str,
        position: int | None = None,
        finish: FinishReason | None = None,
        logprob: float | None = None,
    ) -> None:
        if position is None:
            position = len(self.generation.output_ids)
        self.generation.take(TokenEvent("s", position, self.id_of(piece), logprob, finish))

    def end(self, finish: FinishReason = STOP) -> None:
        self.take("<|im_end|>", finish=finish)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    directory: Path = tmp_path_factory.mktemp("tokenizer")
    write_byte_level(directory)
    return Tokenizer(directory)


def test_without_streaming_there_is_one_response(tokenizer: Tokenizer) -> None:
    run = Run(tokenizer)
    for piece in "xyz":
        run.take(piece)
        assert run.responder.texts == []
    run.end()
    assert run.responder.texts == ["xyz"]


def test_with_streaming_each_token_is_a_response(tokenizer: Tokenizer) -> None:
    run = Run(tokenizer, stream=True)
    run.take("x")
    assert run.responder.texts == ["x"]
    run.take("y")
    run.end()
    assert run.responder.texts == ["x", "y", ""]


def test_a_first_token_may_be_the_last(tokenizer: Tokenizer) -> None:
    for stream in (False, True):
        run = Run(tokenizer, stream=stream)
        run.take("x", finish=LENGTH)
        assert run.responder.texts == ["x"]
        assert run.responder.usage is not None
        assert run.responder.usage.finish_reason is LENGTH


def test_the_stop_token_counts_but_does_not_show(tokenizer: Tokenizer) -> None:
    run = Run(tokenizer, return_output_ids=True)
    run.take("x")
    run.take("y", finish=STOP)  # as a stop_token_id of the user
    assert run.responder.texts == ["x"]
    assert run.responder.usage is not None and run.responder.usage.num_output_tokens == 2
    assert run.responder.final is not None
    assert run.responder.final.output_ids == [run.id_of("x"), run.id_of("y")]


def test_the_last_token_at_the_limit_does_show(tokenizer: Tokenizer) -> None:
    run = Run(tokenizer)
    run.take("x")
    run.take("y", finish=LENGTH)
    assert run.responder.texts == ["xy"]


def test_part_of_a_character_is_not_shown_before_the_rest(tokenizer: Tokenizer) -> None:
    run = Run(tokenizer, stream=True)
    for token_id in tokenizer.encode("é"):
        run.generation.take(TokenEvent("s", len(run.generation.output_ids), token_id))
    run.end()
    assert run.responder.texts == ["é", ""]


def test_an_unfinished_character_shows_at_the_end(tokenizer: Tokenizer) -> None:
    run = Run(tokenizer)
    run.generation.take(TokenEvent("s", 0, tokenizer.encode("é")[0], None, LENGTH))
    assert run.responder.texts == ["\ufffd"]


# ---- stop strings ----------------------------------------------------------------------------


def test_a_stop_string_across_tokens_ends_the_output(tokenizer: Tokenizer) -> None:
    run = Run(tokenizer, stream=True, stop=("yz",))
    for piece in "xyz":
        run.take(piece)
    assert run.responder.texts == ["x", ""], "the y was held back"
    assert run.generation.finish_reason is STOP
    assert run.responder.usage is not None
    assert run.responder.usage.finish_reason is STOP
    assert run.responder.usage.num_output_tokens == 3


def test_what_was_held_for_a_stop_string_is_shown_when_it_does_not_come(
    tokenizer: Tokenizer,
) -> None:
    run = Run(tokenizer, stream=True, stop=("yz",))
    for piece in "xyxy":
        run.take(piece)
    run.end()
    assert run.responder.texts == ["x", "yx", "y"]
    assert run.generation.finish_reason is STOP


def test_a_stop_string_in_the_last_token_is_a_stop(tokenizer: Tokenizer) -> None:
    run = Run(tokenizer, stop=("y",))
    run.take("x")
    run.take("y", finish=LENGTH)
    assert run.responder.texts == ["x"]
    assert run.responder.usage is not None and run.responder.usage.finish_reason is STOP


def test_nothing_is_taken_after_the_end(tokenizer: Tokenizer) -> None:
    run = Run(tokenizer, stream=True, stop=("y",))
    run.take("x")
    run.take("y")
    run.take("z")
    run.take("z", position=9)
    run.end()
    assert run.responder.texts == ["x", ""]
    assert len(run.generation.output_ids) == 2


# ---- duplicates and gaps ---------------------------------------------------------------------


def test_a_repeated_token_is_dropped(tokenizer: Tokenizer) -> None:
    run = Run(tokenizer, stream=True)
    run.take("x")
    run.take("y")
    run.take("z", position=0)
    run.take("z", position=1, finish=LENGTH)
    run.take("z", position=2)
    run.end()
    assert run.responder.texts == ["x", "y", "z", ""]


def test_a_gap_is_a_fault_and_is_not_shown(tokenizer: Tokenizer) -> None:
    run = Run(tokenizer, stream=True)
    run.take("x")
    with pytest.raises(EngineFault, match="token 2 came after 1 tokens"):
        run.take("z", position=2)
    run.take("y")  # the next attempt goes on
    run.end()
    assert run.responder.texts == ["x", "y", ""]


def test_a_first_token_beyond_the_first_position_is_a_gap(tokenizer: Tokenizer) -> None:
    with pytest.raises(EngineFault):
        Run(tokenizer).take("x", position=1)


# ---- what the client asked for ---------------------------------------------------------------


def test_ids_and_logprobs_come_with_their_pieces(tokenizer: Tokenizer) -> None:
    run = Run(tokenizer, stream=True, return_output_ids=True, logprobs=1)
    run.take("x", logprob=-0.5)
    run.take("y", logprob=-1.5)
    run.take("z", logprob=-2.5, finish=LENGTH)
    responses = [*run.responder.pieces, run.responder.final]
    assert [(r.output_ids, r.logprobs) for r in responses if r] == [
        ([run.id_of("x")], [-0.5]),
        ([run.id_of("y")], [-1.5]),
        ([run.id_of("z")], [-2.5]),
    ]


def test_ids_are_not_held_back_with_their_text(tokenizer: Tokenizer) -> None:
    run = Run(tokenizer, stream=True, stop=("yz",), return_output_ids=True)
    run.take("x")
    run.take("y")
    assert run.responder.texts == ["x", ""]
    assert run.responder.pieces[1].output_ids == [run.id_of("y")]


def test_without_streaming_ids_and_logprobs_come_together(tokenizer: Tokenizer) -> None:
    run = Run(tokenizer, return_output_ids=True, logprobs=1)
    run.take("x", logprob=-0.5)
    run.take("y", logprob=-1.5, finish=LENGTH)
    assert run.responder.final == Response("xy", [run.id_of("x"), run.id_of("y")], [-0.5, -1.5])


def test_ids_and_logprobs_are_left_out_by_default(tokenizer: Tokenizer) -> None:
    run = Run(tokenizer)
    run.take("x", logprob=-0.5, finish=LENGTH)
    assert run.responder.final == Response("x", None, None)


@pytest.mark.parametrize("stream", [False, True])
def test_the_input_goes_once_before_the_output(tokenizer: Tokenizer, stream: bool) -> None:
    run = Run(tokenizer, stream=stream, input_text="abc")
    run.take("x")
    run.take("y")
    run.end()
    assert "".join(run.responder.texts) == "abcxy"
    assert run.responder.texts[0].startswith("abcx")


def test_the_final_response_carries_the_usage(tokenizer: Tokenizer) -> None:
    run = Run(tokenizer)
    run.take("x")
    run.take("y", finish=LENGTH)
    usage = run.responder.usage
    assert usage is not None and usage.timings is not None
    assert (usage.finish_reason, usage.num_input_tokens, usage.num_output_tokens) == (LENGTH, 3, 2)


@pytest.mark.parametrize(
    "name", ["finish_reason", "num_input_tokens", "num_output_tokens", "timings"]
)
def test_each_part_of_the_usage_can_be_switched_off(tokenizer: Tokenizer, name: str) -> None:
    run = Run(tokenizer, **{f"return_{name}": False})
    run.take("x", finish=LENGTH)
    values = vars(run.responder.usage)
    assert {key for key, value in values.items() if value is None} == {name}


# ---- timings and metrics ---------------------------------------------------------------------


def test_the_timings_of_a_remote_request(tokenizer: Tokenizer) -> None:
    run = Run(tokenizer)
    generation = run.generation
    generation.timings.path = "remote"
    run.clock.now_s += 0.25
    token = TokenEvent("s", 0, run.id_of("x"))
    reply = PrefillReply(
        worker="prefill_0_0", token=token, num_cached_tokens=16, queue_s=0.125, prefill_s=0.0625
    )
    generation.prefilled_remotely(reply)
    generation.take(token)
    generation.admitted(
        Admitted(
            worker="decode_0_0",
            incarnation="aa",
            num_pulled_blocks=2,
            pulled_bytes=4096,
            pull_s=0.03125,
            transport="nixl",
        )
    )
    run.clock.now_s += 1.5
    run.take("y", finish=LENGTH)
    assert run.responder.usage is not None
    assert run.responder.usage.timings == {
        "path": "remote",
        "prefill_worker": "prefill_0_0",
        "decode_worker": "decode_0_0",
        "queue_ms": 125.0,
        "prefill_ms": 62.5,
        "transfer_ms": 31.25,
        "ttft_ms": 250.0,
        "decode_ms": 1500.0,
        "cached_tokens": 16,
        "kv_bytes": 4096,
        "transport": "nixl",
        "retries": 0,
    }
    counters, _, observations = run.metrics.drain()
    assert counters[Key("tandem_output_tokens_total")] == 2
    assert counters[Key("tandem_cached_tokens_total")] == 16
    assert counters[Key("tandem_requests_total", "length")] == 1
    observed = dict(observations)
    assert observed[Key("tandem_ttft_seconds")] == 0.25
    assert observed[Key("tandem_itl_seconds")] == 1.5
    assert observed[Key("tandem_transfer_seconds", "nixl")] == 0.03125
    assert observed[Key("tandem_prefill_seconds", "remote")] == 0.0625
    assert observed[Key("tandem_queue_seconds", "prefill")] == 0.125


def test_the_timings_of_a_local_request(tokenizer: Tokenizer) -> None:
    run = Run(tokenizer)
    generation = run.generation
    generation.timings.path = "local"
    generation.admitted(Admitted(worker="decode_0_0", incarnation="aa"))
    generation.prefilled_locally(
        Prefilled(sequence_id="s", num_cached_tokens=32, queue_s=0.5, prefill_s=0.25)
    )
    run.take("x", finish=LENGTH)
    assert run.responder.usage is not None and run.responder.usage.timings is not None
    timings = run.responder.usage.timings
    assert timings["prefill_worker"] == timings["decode_worker"] == "decode_0_0"
    assert (timings["queue_ms"], timings["prefill_ms"], timings["cached_tokens"]) == (500, 250, 32)
    assert (timings["transfer_ms"], timings["kv_bytes"], timings["decode_ms"]) == (0, 0, 0)
    _, _, observations = run.metrics.drain()
    assert Key("tandem_transfer_seconds") not in dict(observations)
    assert dict(observations)[Key("tandem_queue_seconds", "decode")] == 0.5


def test_a_dropped_token_is_not_counted(tokenizer: Tokenizer) -> None:
    run = Run(tokenizer)
    run.take("x")
    run.take("x", position=0)
    assert run.metrics.drain()[0] == {Key("tandem_output_tokens_total"): 1}
