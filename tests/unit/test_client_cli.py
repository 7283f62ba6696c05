"""The commands against a server on 127.0.0.1: what goes to stdout, to stderr, and the exit code."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import typer
from typer.testing import CliRunner, Result

from tandem_client import Completion, TandemClient, Timings
from tandem_client.chat_session import ChatSession
from tandem_client.cli import chat, generate
from tandem_client.summary import summary_line
from test_client_servers import Error, FakeTriton, Hang, Step, final, http_server, token

app = typer.Typer()
app.command()(generate)
app.command()(chat)

ANSWER: list[Step] = [token("Hel"), final("lo", 9)]
SUMMARY = (
    "9 tokens · TTFT 212 ms · 18.3 tok/s · remote prefill_0_0 → decode_0_0"
    " · 1.2 MB KV in 0.8 ms by shm\n"
)


def run(fake: FakeTriton, *args: str, stdin: str | None = None) -> Result:
    return CliRunner().invoke(app, [*args, "--url", fake.url], input=stdin)


def test_generate_streams_to_stdout_and_sums_up_on_stderr() -> None:
    with http_server(FakeTriton(ANSWER)) as fake:
        result = run(fake, "generate", "Hi", "--max-tokens", "9", "--stop", "a", "--stop", "b")
    assert (result.exit_code, result.stdout, result.stderr) == (0, "Hello\n", SUMMARY)
    assert fake.requests == [
        {"stream": True, "text_input": "Hi", "max_tokens": 9, "stop": ["a", "b"]}
    ]


def test_generate_reads_stdin_and_prints_json() -> None:
    with http_server(FakeTriton([final("Hello", 9)])) as fake:
        result = run(fake, "generate", "-", "--json", stdin="a prompt\n")
    assert fake.requests == [{"stream": False, "text_input": "a prompt"}]
    completion = json.loads(result.stdout)
    assert (completion["text"], completion["num_output_tokens"]) == ("Hello", 9)
    assert completion["timings"]["prefill_worker"] == "prefill_0_0"
    assert result.stderr == ""


def test_generate_without_streaming() -> None:
    with http_server(FakeTriton([final("Hello", 9)])) as fake:
        result = run(fake, "generate", "Hi", "--no-stream", "--model", "ensemble")
    assert (result.stdout, result.stderr) == ("Hello\n", SUMMARY)
    assert fake.paths == ["/v2/models/ensemble/generate"]


@pytest.mark.parametrize(
    ("message", "exit_code"),
    [("[INVALID_ARG] seed: no", 2), ("[UNAVAILABLE] seed: no", 3), ("[INTERNAL] seed: no", 1)],
)
def test_an_error_is_one_line_and_an_exit_code(message: str, exit_code: int) -> None:
    with http_server(FakeTriton([Error(message)])) as fake:
        result = run(fake, "generate", "Hi")
    assert (result.exit_code, result.stderr) == (exit_code, "error: seed: no\n")


def test_no_server_exits_with_3() -> None:
    with http_server(FakeTriton()) as fake:
        pass
    assert run(fake, "generate", "Hi").exit_code == 3


def test_chat_keeps_the_history_until_reset() -> None:
    with http_server(FakeTriton(ANSWER)) as fake:
        result = run(
            fake, "chat", "--system", "Be brief.", stdin="one\ntwo\n/reset\nthree\n/exit\n"
        )
    system = {"role": "system", "content": "Be brief."}
    first = [system, {"role": "user", "content": "one"}]
    second = [
        *first,
        {"role": "assistant", "content": "Hello"},
        {"role": "user", "content": "two"},
    ]
    third = [system, {"role": "user", "content": "three"}]
    assert [json.loads(r["messages"]) for r in fake.requests] == [first, second, third]
    assert (result.exit_code, result.stdout) == (0, "Hello\n" * 3)
    assert result.stderr.count(SUMMARY) == 3


def test_chat_survives_an_error_and_leaves_with_its_code() -> None:
    with http_server(FakeTriton([token("a"), Error("[UNAVAILABLE] busy")])) as fake:
        result = run(fake, "chat", stdin="one\ntwo\n")
    assert [len(json.loads(r["messages"])) for r in fake.requests] == [1, 1]
    assert (result.exit_code, result.stderr.count("error: busy\n")) == (3, 2)


def test_a_cancelled_turn_keeps_what_was_shown() -> None:
    with http_server(FakeTriton([token("a"), Hang()])) as fake, TandemClient(fake.url) as client:
        session = ChatSession(client, None, {})
        answer = session.ask("one")
        assert next(answer) == "a"
        answer.close()
        assert fake.client_left.wait(5)
    assert [turn["content"] for turn in session.messages] == ["one", "a"]
    assert session.last_completion is None


def test_ctrl_c_stops_the_answer_and_the_chat_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*args: object) -> None:
        raise KeyboardInterrupt

    with http_server(FakeTriton([token("a"), Hang()])) as fake:
        monkeypatch.setattr("tandem_client.cli._write", interrupt)
        result = run(fake, "chat", stdin="one\ntwo\n")
    assert fake.client_left.is_set()
    assert [len(json.loads(r["messages"])) for r in fake.requests] == [1, 3]
    assert (result.exit_code, result.stderr.count("(cancelled)")) == (0, 2)


@pytest.mark.parametrize(
    ("num_tokens", "timings", "line"),
    [
        (1, Timings(), "1 token"),
        (1, Timings(ttft_ms=3.2, decode_ms=0.0), "1 token · TTFT 3 ms"),
        (3, Timings(path="local", decode_worker="decode_0_1"), "3 tokens · local decode_0_1"),
        (2, Timings(kv_bytes=46_080, cached_tokens=16), "2 tokens · 46.1 kB KV · 16 cached"),
        (2, Timings(retries=1), "2 tokens · 1 retry"),
    ],
)
def test_the_summary_leaves_out_what_is_unknown(
    num_tokens: int, timings: Timings, line: str
) -> None:
    completion = Completion(
        text="",
        finish_reason="stop",
        num_input_tokens=1,
        num_output_tokens=num_tokens,
        output_ids=None,
        logprobs=None,
        timings=timings,
    )
    assert summary_line(completion) == line


def test_the_commands_load_no_protocol_before_they_need_one() -> None:
    program = (
        "import sys, tandem_client.cli;"
        "print(sorted({'grpc', 'httpx', 'torch', 'numpy', 'tandem'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=30)
    assert done.stdout.decode().strip() == "[]"
