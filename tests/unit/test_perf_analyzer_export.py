"""TTFT and ITL from a profile export made by hand, and perf_analyzer's input and installation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from tandem_cli.errors import CliError
from tandem_perf.perf_analyzer_export import ExportSummary, main, read_export
from tandem_perf.perf_analyzer_input import input_data
from tandem_perf.perf_analyzer_install import LIBRARIES, find_libraries

MS = 1_000_000  # ns
START = 1_796_032_776_000_000_000


def token(text: str = "a", num_tokens: int = 0) -> dict[str, Any]:
    """As exported: an output that the response does not have is "", 0 or arbitrary."""
    reason = "length" if num_tokens else ""
    return {"text_output": text, "num_output_tokens": num_tokens, "finish_reason": reason,
            "logprobs": -2.8e29}  # fmt: skip


def request(sent_ms: int, arrivals_ms: list[int], outputs: list[Any] | None) -> dict[str, Any]:
    made: dict[str, Any] = {
        "timestamp": START + sent_ms * MS,
        "request_inputs": {"text_input": "x"},
        "response_timestamps": [START + arrival * MS for arrival in arrivals_ms],
    }
    return made if outputs is None else made | {"response_outputs": outputs}


def summary_of(tmp_path: Path, *requests: dict[str, Any]) -> ExportSummary:
    experiment = {
        "experiment": {"mode": "concurrency", "value": 2},
        "requests": requests,
        "window_boundaries": [START, START + 1000 * MS],
    }
    path = tmp_path / "export.json"
    path.write_bytes(msgspec.json.encode({"experiments": [experiment], "version": "2.51.0"}))
    (summary,) = read_export(path)
    return summary


def test_figures_of_two_requests(tmp_path: Path) -> None:
    summary = summary_of(
        tmp_path,
        request(0, [100, 120, 160], [token(), token(), token(num_tokens=3)]),
        request(50, [250, 500], [token(), token(num_tokens=2)]),
    )
    assert summary.load == "concurrency 2"
    assert (summary.requests, summary.without_tokens) == (2, 0)
    assert summary.ttft.p50 == pytest.approx(0.150)  # of 100 and 200 ms
    assert (summary.itl.count, summary.itl.max) == (3, pytest.approx(0.250))
    assert summary.itl.mean == pytest.approx((0.020 + 0.040 + 0.250) / 3)
    assert summary.e2e.max == pytest.approx(0.450)
    assert summary.tokens_per_s == pytest.approx(5 / 0.5)
    assert summary.requests_per_s == pytest.approx(2 / 0.5)


@pytest.mark.parametrize(
    "outputs",
    [
        pytest.param([token(), token(), token("", num_tokens=2)], id="finish reason alone"),
        pytest.param([token(), token(num_tokens=2), {}], id="Triton's final flag"),
    ],
)
def test_an_empty_last_response_is_no_token(tmp_path: Path, outputs: list[Any]) -> None:
    summary = summary_of(tmp_path, request(0, [100, 120, 160], outputs))
    assert (summary.itl.count, summary.itl.max) == (1, pytest.approx(0.020))
    assert summary.e2e.max == pytest.approx(0.120)


@pytest.mark.parametrize(
    "outputs",
    [
        pytest.param([token(), token(""), token("", num_tokens=3)], id="tokens without text"),
        pytest.param([token(), token(""), token("b", num_tokens=3)], id="text at the end"),
        pytest.param(None, id="no outputs in the export"),
    ],
)
def test_a_last_token_is_kept(tmp_path: Path, outputs: list[Any] | None) -> None:
    summary = summary_of(tmp_path, request(0, [100, 120, 160], outputs))
    assert (summary.itl.count, summary.e2e.max) == (2, pytest.approx(0.160))


def test_requests_without_a_token_are_counted_not_averaged(tmp_path: Path) -> None:
    summary = summary_of(
        tmp_path,
        request(0, [100, 120], [token(), token(num_tokens=2)]),
        request(0, [], []),
        request(0, [5], [token("", num_tokens=0)]),
    )
    assert (summary.requests, summary.without_tokens) == (3, 2)
    assert (summary.ttft.count, summary.ttft.mean) == (1, pytest.approx(0.100))


def test_the_command_fails_where_requests_have_no_tokens(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    summary_of(tmp_path, request(0, [100, 120], None))
    main(tmp_path / "export.json", tmp_path / "out.json")
    assert "TTFT" in capsys.readouterr().out
    written = msgspec.json.decode((tmp_path / "out.json").read_bytes(), type=list[ExportSummary])
    assert written[0].ttft.count == 1
    summary_of(tmp_path, request(0, [], None))
    with pytest.raises(SystemExit):
        main(tmp_path / "export.json")
    assert "1 of 1 requests got no token" in capsys.readouterr().out


@pytest.mark.parametrize("content", [b"", b"{}", b'{"experiments": [{}]}'])
def test_another_file_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "export.json"
    path.write_bytes(content)
    with pytest.raises(SystemExit, match="export.json"):
        main(path)


def test_input_data_has_one_request_a_prompt() -> None:
    data = input_data(["hello", "world"], max_tokens=7)["data"]
    assert [request["text_input"] for request in data] == [["hello"], ["world"]]
    assert all(request["max_tokens"] == [7] and request["stream"] == [True] for request in data)


def test_libraries_are_found_under_their_hashed_names(tmp_path: Path) -> None:
    hashed = ("libb64-98cb6333.so.0d", "libcudart-09529672.so.12.6.77", "libssl-57118d4e.so.3")
    for name in hashed:
        (tmp_path / name).touch()
    found = find_libraries(tmp_path)
    assert {name: path.name for name, path in found.items()} == dict(
        zip(LIBRARIES, hashed, strict=False)
    )
    (tmp_path / hashed[0]).unlink()
    with pytest.raises(CliError, match="libb64"):
        find_libraries(tmp_path)
