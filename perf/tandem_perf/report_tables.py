"""Tables of the report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from tandem_perf.chart_style import DEPLOYMENT_COLORS
from tandem_perf.comparison import Row, Spread, Verdict, spread
from tandem_perf.comparison_table import format_number, format_spread
from tandem_perf.html_parts import Html, join, row, table, tag
from tandem_perf.report_data import ReportData, Run
from tandem_perf.slo import Slo
from tandem_perf.statistics import Group

# What is shown on top: (section, metric, why a user cares).
_HEADLINES = (
    ("all requests", "TTFT p50", "how long users wait for the first word"),
    ("all requests", "ITL p99", "how badly a running answer stalls"),
    ("throughput", "goodput (in SLO)", "requests per second that met every SLO"),
    ("throughput", "output tokens", "tokens per second"),
    ("cost", "CPU per output token", "of all server processes"),
)
_MARKS = {Verdict.BETTER: " ▲", Verdict.WORSE: " ▼", Verdict.UNCLEAR: ""}
_NUM_CARDS = 4


def headline_cards(data: ReportData) -> Html:
    """A card a metric, a bar a deployment."""
    rows = {(row.section, row.metric): row for row in data.rows}
    chosen = [
        (rows[section, metric], hint)
        for section, metric, hint in _HEADLINES
        if (section, metric) in rows
    ]
    return tag("div", *(_card(row, hint) for row, hint in chosen[:_NUM_CARDS]), css="cards")


def comparison_table(data: ReportData) -> Html:
    first, *others = data.deployments
    head: list[object] = ["", first]
    for name in others:
        head += [name, "ratio"]
    return table(head, _comparison_rows(data.rows, first, others))


def class_table(data: ReportData) -> Html:
    """Counts and latencies by deployment and length class; all rounds together."""
    head = ["", "class", "requests", "failed", "in SLO %", "TTFT p50", "TTFT p95", "ITL p50",
            "ITL p99", "TPOT p50", "e2e p50"]  # fmt: skip
    return table(head, _class_rows(data))


def error_table(data: ReportData) -> Html:
    """Failed requests and runs; a sentence if there are none."""
    rows = list(_error_rows(data))
    if not rows:
        total = sum(run.summary.statistics.overall.requests for run in _all_runs(data))
        return tag("p", f"None: all {total:,} requests of all runs were answered.")
    return table(["deployment", "count", "message"], rows)


def machine_table(data: ReportData) -> Html:
    summary = data.first
    machine = summary.machine
    facts = {
        "CPU": machine.cpu,
        "cores": str(machine.cores),
        "memory": f"{machine.memory_bytes / 2**30:.1f} GiB",
        "system": machine.system,
        "Python": machine.python,
        "load average before": " ".join(f"{load:.1f}" for load in machine.load_average),
        "packages": ", ".join(f"{name} {version}" for name, version in machine.versions.items()),
    }
    if data.comparison:
        provenance = data.comparison.provenance
        facts["CPU instructions"] = ", ".join(provenance.cpu_flags) or "unknown"
        facts["cores of the servers"] = provenance.cores_of_servers
        facts["commit"] = provenance.commit
    return _facts(facts)


def method_table(data: ReportData) -> Html:
    summary = data.first
    facts: dict[str, object] = {
        "workload": summary.workload,
        "arrivals": summary.arrivals,
        "requests of a run": f"{summary.requests_prepared} (after {summary.warm_up} to warm up)",
        "rounds": str(data.num_rounds),
        "seed": str(summary.seed),
        "digest of the requests": summary.request_digest,
        "SLO": str(Slo(summary.slo)) or "none given: goodput counts every completed request",
        "started": f"{summary.started_at} (UTC)",
    }
    if data.comparison:
        facts["command"] = tag("code", data.comparison.provenance.command)
        for name, known in data.comparison.facts.items():
            facts[name] = join(
                tag("div", tag("span", f"{key}: ", css="unit"), value)
                for key, value in known.items()
            )
    return _facts(facts)


def _card(metric: Row, hint: str) -> Html:
    values = {name: value for name, value in metric.values.items() if value is not None}
    highest = max(value.median for value in values.values()) or 1.0
    better = "higher" if metric.is_higher_better else "lower"
    bars = (
        tag(
            "div",
            tag("span", name, css="name"),
            tag("span", f"{format_number(values[name].median)} {metric.unit}", css="value"),
            tag("div", tag("div", css="fill", style=_fill(values[name], highest, number)),
                css="track"),
            css="bar",
        )
        for number, name in enumerate(metric.values)
        if name in values
    )  # fmt: skip
    title = tag("h3", metric.metric)
    return tag("div", title, tag("p", f"{hint}; {better} is better", css="hint"), *bars,
               css="card")  # fmt: skip


def _fill(value: Spread, highest: float, number: int) -> str:
    color = DEPLOYMENT_COLORS[number % len(DEPLOYMENT_COLORS)]
    return f"width: {value.median / highest:.1%}; background: {color}"


def _comparison_rows(rows: tuple[Row, ...], first: str, others: list[str]) -> Iterator[Html]:
    section = ""
    for metric in rows:
        if metric.section != section:
            section = metric.section
            span = str(2 + 2 * len(others))
            yield tag("tr", tag("th", section, colspan=span, scope="colgroup"), css="group")
        label = join([metric.metric, " ", tag("span", metric.unit, css="unit")])
        cells: list[object] = [_value(metric.values[first])]
        for name in others:
            cells += [_value(metric.values[name]), _ratio(metric, name)]
        yield row(label, *cells)


def _value(value: Spread | None) -> Html:
    median, _, rest = format_spread(value).partition(" ")
    return join([median, " ", tag("span", rest, css="spread")] if rest else [median])


def _ratio(metric: Row, name: str) -> Html:
    ratio = metric.ratios[name]
    if ratio is None:
        return Html("–")
    verdict = metric.verdict(name)
    return tag("span", f"×{format_spread(ratio)}{_MARKS[verdict]}", css=f"ratio {verdict}")


def _class_rows(data: ReportData) -> Iterator[Html]:
    for name in data.deployments:
        groups: dict[str, list[Group]] = {}
        for run in data.runs[name]:
            statistics = run.summary.statistics
            groups.setdefault("all", []).append(statistics.overall)
            for label in data.length_classes:
                if label in statistics.by_class:
                    groups.setdefault(label, []).append(statistics.by_class[label])
        for label, found in groups.items():
            latencies = [group.latencies for group in found]
            yield row(
                name if label == "all" else "",
                label,
                str(sum(group.requests for group in found)),
                str(sum(group.failed for group in found)),
                _median(g.attainment * 100 for g in found if g.attainment is not None),
                _median_ms(x.ttft.p50 for x in latencies),
                _median_ms(x.ttft.p95 for x in latencies),
                _median_ms(x.itl.p50 for x in latencies),
                _median_ms(x.itl.p99 for x in latencies),
                _median_ms(x.tpot.p50 for x in latencies),
                _median_ms(x.e2e.p50 for x in latencies),
            )


def _median_ms(values: Iterator[float | None]) -> str:
    return _median(value * 1e3 for value in values if value is not None)


def _median(values: Iterator[float]) -> str:
    found = spread(values)
    return "–" if found is None else format_number(found.median)


def _error_rows(data: ReportData) -> Iterator[Html]:
    for fault in data.comparison.faults if data.comparison else ():
        message = tag("td", f"round {fault.round} was not measured: {fault.message}", css="message")
        yield tag("tr", tag("th", fault.deployment, scope="row"), tag("td", "1 run"), message)
    counts: Counter[tuple[str, str]] = Counter()
    for run in _all_runs(data):
        for message_text, count in run.summary.statistics.errors.items():
            counts[(run.summary.deployment, message_text)] += count
    for (name, message_text), count in counts.most_common():
        message = tag("td", message_text, css="message")
        yield tag("tr", tag("th", name, scope="row"), tag("td", str(count)), message)


def _all_runs(data: ReportData) -> list[Run]:
    return [run for runs in (data.runs, data.sweep) for found in runs.values() for run in found]


def _facts(facts: dict[str, object] | dict[str, str]) -> Html:
    rows = [row(name, value) for name, value in facts.items()]
    return tag("div", tag("table", tag("tbody", *rows), css="facts"), css="scroll")
