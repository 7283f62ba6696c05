"""From records to figures: latencies, throughput, errors, goodput."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import chain

import msgspec

from tandem_perf.percentiles import Distribution, distribution
from tandem_perf.records import Outcome, RequestRecord
from tandem_perf.slo import Slo


class Latencies(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds, of completed requests. ``itl`` is over all gaps of all requests, ``tpot`` over
    requests; both count from the scheduled time where a start is involved.
    """

    ttft: Distribution
    itl: Distribution
    tpot: Distribution
    e2e: Distribution


class Group(msgspec.Struct, frozen=True, kw_only=True):
    """Requests of one length class, or all of them.

    ``attainment``: share of requests that met every SLO. Failed ones count as missed; cancelled
    ones (the run was stopped) do not count. None if none counts.
    """

    requests: int
    completed: int
    failed: int
    cancelled: int
    met_slo: int
    attainment: float | None
    prompt_tokens: int
    output_tokens: int
    latencies: Latencies


class Statistics(msgspec.Struct, frozen=True, kw_only=True):
    """Of one run. Rates are over ``duration_s``: start of the run to the end of its last request.

    Tokens per second in count prompts of completed requests; out counts every token that came.
    ``goodput``: completed requests per second that met every SLO. ``errors``: message → requests.
    ``send_lag``: scheduled to sent; if it is not small, the sender was too slow for this load.
    ``with_chunks``: requests some of whose chunks held several tokens (ITL is then per chunk).
    ``wrong_length``: completed requests with another number of output tokens than asked for.
    """

    duration_s: float
    requests_per_s: float
    input_tokens_per_s: float
    output_tokens_per_s: float
    goodput: float
    overall: Group
    by_class: dict[str, Group]
    errors: dict[str, int]
    send_lag: Distribution
    with_chunks: int
    wrong_length: int


def statistics_of(records: Sequence[RequestRecord], slo: Slo) -> Statistics:
    duration_s = max((record.ended_s for record in records), default=0.0)
    overall = _group(records, slo)
    completed = [record for record in records if record.is_ok]
    classes = sorted({record.length_class for record in records})

    def per_s(amount: int) -> float:
        return amount / duration_s if duration_s > 0 else 0.0

    return Statistics(
        duration_s=duration_s,
        requests_per_s=per_s(overall.completed),
        input_tokens_per_s=per_s(overall.prompt_tokens),
        output_tokens_per_s=per_s(overall.output_tokens),
        goodput=per_s(overall.met_slo),
        overall=overall,
        by_class={
            name: _group([record for record in records if record.length_class == name], slo)
            for name in classes
        },
        errors=dict(
            Counter(
                f"{record.outcome}: {record.error}"
                for record in records
                if record.outcome in (Outcome.ERROR, Outcome.TIMEOUT)
            ).most_common()
        ),
        send_lag=distribution(
            record.sent_s - record.scheduled_s for record in records if record.sent_s is not None
        ),
        with_chunks=sum(record.has_chunks for record in records),
        wrong_length=sum(record.output_tokens != record.max_tokens for record in completed),
    )


def _group(records: Sequence[RequestRecord], slo: Slo) -> Group:
    outcomes = Counter(record.outcome for record in records)
    completed = [record for record in records if record.is_ok]
    met_slo = sum(slo.is_met(record) for record in completed)
    counted = len(records) - outcomes[Outcome.CANCELLED]
    return Group(
        requests=len(records),
        completed=len(completed),
        failed=outcomes[Outcome.ERROR] + outcomes[Outcome.TIMEOUT],
        cancelled=outcomes[Outcome.CANCELLED],
        met_slo=met_slo,
        attainment=met_slo / counted if counted else None,
        prompt_tokens=sum(record.prompt_tokens for record in completed),
        output_tokens=sum(record.output_tokens for record in records),
        latencies=Latencies(
            ttft=distribution(record.ttft_s for record in completed),
            itl=distribution(chain.from_iterable(record.gaps_s for record in completed)),
            tpot=distribution(record.tpot_s for record in completed),
            e2e=distribution(record.e2e_s for record in completed),
        ),
    )
