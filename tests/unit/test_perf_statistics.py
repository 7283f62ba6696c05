"""Every figure against values computed by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from tandem_perf.percentiles import Distribution, distribution, percentile
from tandem_perf.records import Outcome, RecordWriter, RequestRecord, ServerTimings, read_records
from tandem_perf.slo import Slo, SloError, parse_slo
from tandem_perf.statistics import statistics_of


def record(times_s: list[float], scheduled_s: float = 0.0, **changes: Any) -> RequestRecord:
    fields: dict[str, Any] = {
        "request_id": "0",
        "deployment": "d",
        "workload": "w",
        "length_class": "short",
        "scheduled_s": scheduled_s,
        "sent_s": scheduled_s,
        "ended_s": times_s[-1] if times_s else scheduled_s,
        "first_token_s": times_s[0] if times_s else None,
        "last_token_s": times_s[-1] if times_s else None,
        "token_times_s": tuple(times_s),
        "prompt_tokens": 10,
        "output_tokens": len(times_s),
        "max_tokens": len(times_s),
        "outcome": Outcome.OK,
    }
    return RequestRecord(**(fields | changes))


def failed(outcome: Outcome, error: str, **changes: Any) -> RequestRecord:
    return record([], outcome=outcome, error=error, ended_s=1.0, **changes)


@pytest.mark.parametrize(
    ("values", "percent", "expected"),
    [
        ([1.0, 2.0, 3.0, 4.0, 5.0], 50, 3.0),
        ([1.0, 2.0, 3.0, 4.0], 50, 2.5),
        ([10.0, 20.0], 90, 19.0),
        ([float(value) for value in range(1, 101)], 99, 99.01),
        ([7.0], 99, 7.0),
        ([1.0, 2.0, 4.0], 100, 4.0),
        ([1.0, 2.0, 4.0], 0, 1.0),
    ],
)
def test_percentiles_interpolate(values: list[float], percent: float, expected: float) -> None:
    assert percentile(values, percent) == pytest.approx(expected)


def test_distribution_of_unsorted_values_without_those_that_are_missing() -> None:
    result = distribution([4.0, None, 1.0, 3.0, 2.0])
    assert result.count == 4
    assert result.mean == 2.5
    assert result.p50 == 2.5
    assert result.p90 == pytest.approx(3.7)
    assert result.p95 == pytest.approx(3.85)
    assert result.p99 == pytest.approx(3.97)
    assert result.max == 4.0


def test_no_values_give_none_not_zero() -> None:
    assert distribution([]) == Distribution()
    assert distribution([None]).p99 is None


def test_latencies_count_from_the_scheduled_time() -> None:
    one = record([1.5, 1.6, 1.8, 2.1], scheduled_s=1.0, sent_s=1.4)
    assert one.ttft_s == pytest.approx(0.5)
    assert one.e2e_s == pytest.approx(1.1)
    assert one.tpot_s == pytest.approx(0.2)  # 0.6 / 3
    assert one.gaps_s == pytest.approx([0.1, 0.2, 0.3])


def test_tokens_of_one_chunk_make_no_zero_gaps() -> None:
    chunked = record([1.0, 1.0, 1.4, 1.4], has_chunks=True)
    assert chunked.gaps_s == pytest.approx([0.4])
    assert chunked.tpot_s == pytest.approx(0.4 / 3)


def test_one_token_has_neither_tpot_nor_gaps() -> None:
    assert record([1.0]).tpot_s is None
    assert record([1.0]).gaps_s == []


def test_statistics_of_two_classes() -> None:
    records = [
        record([0.1, 0.2, 0.3], length_class="short"),
        record([1.2, 1.4], scheduled_s=1.0, length_class="short"),
        record([3.0, 4.0], scheduled_s=2.0, length_class="long", prompt_tokens=100, sent_s=2.5),
    ]
    result = statistics_of(records, parse_slo("ttft=0.5"))
    assert result.duration_s == 4.0
    assert result.requests_per_s == pytest.approx(3 / 4)
    assert result.input_tokens_per_s == pytest.approx(120 / 4)
    assert result.output_tokens_per_s == pytest.approx(7 / 4)
    assert result.goodput == pytest.approx(2 / 4)
    assert result.overall.attainment == pytest.approx(2 / 3)
    assert result.overall.latencies.ttft.mean == pytest.approx((0.1 + 0.2 + 1.0) / 3)
    assert result.overall.latencies.itl.count == 4
    assert result.overall.latencies.itl.mean == pytest.approx((0.1 + 0.1 + 0.2 + 1.0) / 4)
    assert result.overall.latencies.tpot.mean == pytest.approx((0.1 + 0.2 + 1.0) / 3)
    assert result.send_lag.max == 0.5
    short, long = result.by_class["short"], result.by_class["long"]
    assert (short.requests, short.met_slo, short.attainment) == (2, 2, 1.0)
    assert (long.requests, long.met_slo, long.attainment) == (1, 0, 0.0)
    assert short.latencies.e2e.mean == pytest.approx((0.3 + 0.4) / 2)


def test_failures_are_counted_and_never_averaged() -> None:
    records = [
        record([0.1, 0.2]),
        failed(Outcome.ERROR, "full"),
        failed(Outcome.ERROR, "full"),
        failed(Outcome.TIMEOUT, "no final response within 1 s"),
        failed(Outcome.CANCELLED, "the run was stopped"),
        record([5.0, 9.0], outcome=Outcome.ERROR, error="cut"),
    ]
    result = statistics_of(records, Slo())
    overall = result.overall
    assert (overall.requests, overall.completed, overall.failed, overall.cancelled) == (6, 1, 4, 1)
    assert overall.attainment == pytest.approx(1 / 5)
    assert overall.latencies.ttft.count == 1
    assert overall.latencies.ttft.max == pytest.approx(0.1)
    assert result.errors == {
        "error: full": 2,
        "timeout: no final response within 1 s": 1,
        "error: cut": 1,
    }


def test_no_completed_request_gives_no_latencies() -> None:
    result = statistics_of([failed(Outcome.ERROR, "refused")], Slo())
    assert result.overall.attainment == 0.0
    assert result.overall.latencies.ttft.p50 is None
    assert result.goodput == 0.0
    assert statistics_of([], Slo()).overall.attainment is None


def test_an_answer_of_another_length_is_noticed() -> None:
    result = statistics_of([record([0.1, 0.2], max_tokens=3), record([0.1, 0.2])], Slo())
    assert result.wrong_length == 1


@pytest.mark.parametrize(
    ("slo", "is_met"),
    [
        ("", True),
        ("ttft=0.5", True),
        ("ttft=499ms", False),
        ("tpot=0.17s", True),
        ("tpot=0.16", False),
        ("itl_max=0.25", True),
        ("itl_max=0.249", False),
        ("itl_p50=0.125", True),
        ("itl_p99=0.24", False),
        ("e2e=1", True),
        ("ttft=1,e2e=0.9", False),
    ],
)
def test_slo(slo: str, is_met: bool) -> None:
    # TTFT 0.5; gaps 0.125, 0.25, 0.125; TPOT 0.5 / 3; p99 of the gaps 0.2475; end to end 1.
    assert parse_slo(slo).is_met(record([0.5, 0.625, 0.875, 1.0])) is is_met


def test_slo_of_what_a_request_does_not_have_is_not_missed() -> None:
    assert parse_slo("tpot=0.01,itl_p99=0.01").is_met(record([1.0]))
    assert not Slo().is_met(record([]))


@pytest.mark.parametrize("text", ["ttfb=1", "ttft", "ttft=fast", "ttft=0", "ttft=-1", "ttft=nan"])
def test_a_bad_slo_is_named(text: str) -> None:
    with pytest.raises(SloError, match=text.partition("=")[0]):
        parse_slo(text)


def test_records_survive_the_file(tmp_path: Path) -> None:
    records = [
        record([0.1, 0.2], server=ServerTimings(path="remote", transfer_ms=1.5, kv_bytes=9)),
        failed(Outcome.TIMEOUT, "late"),
    ]
    path = tmp_path / "records.jsonl"
    with RecordWriter(path) as writer:
        for one in records:
            writer.write(one)
    assert list(read_records(path)) == records
    assert msgspec.json.decode(path.read_bytes().splitlines()[1])["outcome"] == "timeout"
