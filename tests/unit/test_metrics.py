import threading
from concurrent.futures import ThreadPoolExecutor

from tandem.metrics import ENGINE_FAMILIES, ORCHESTRATOR_FAMILIES, Family, Key, MetricsBuffer


def test_counts_add_up_per_label() -> None:
    metrics = MetricsBuffer()
    metrics.count("tokens")
    metrics.count("tokens", 2.5)
    metrics.count("tokens", label_value="a")
    metrics.count("other", 0)
    counters, gauges, observations = metrics.drain()
    assert counters == {Key("tokens"): 3.5, Key("tokens", "a"): 1, Key("other"): 0}
    assert (gauges, observations) == ({}, [])


def test_a_gauge_keeps_its_newest_value() -> None:
    metrics = MetricsBuffer()
    metrics.set("running", 3)
    metrics.set("running", 1)
    metrics.set("blocks", 7, "free")
    assert metrics.drain()[1] == {Key("running"): 1, Key("blocks", "free"): 7}


def test_every_observation_is_kept_in_order() -> None:
    metrics = MetricsBuffer()
    for value in (0.3, 0.1, 0.3):
        metrics.observe("seconds", value)
    metrics.observe("seconds", 0.2, "remote")
    assert metrics.drain()[2] == [
        (Key("seconds"), 0.3),
        (Key("seconds"), 0.1),
        (Key("seconds"), 0.3),
        (Key("seconds", "remote"), 0.2),
    ]


def test_a_drain_takes_everything_once() -> None:
    metrics = MetricsBuffer()
    metrics.count("tokens")
    metrics.set("running", 1)
    metrics.observe("seconds", 1.0)
    drained = metrics.drain()
    assert metrics.drain() == ({}, {}, [])
    metrics.count("tokens", 5)
    assert drained[0] == {Key("tokens"): 1}, "what was drained is the caller's"
    assert metrics.drain()[0] == {Key("tokens"): 5}


def test_nothing_is_lost_between_threads() -> None:
    metrics = MetricsBuffer()
    barrier = threading.Barrier(5, timeout=10)
    totals = {"count": 0.0, "observe": 0.0}

    def write() -> None:
        barrier.wait()
        for _ in range(500):
            metrics.count("tokens")
            metrics.observe("seconds", 1.0)

    def drain() -> None:
        counters, _, observations = metrics.drain()
        totals["count"] += counters.get(Key("tokens"), 0)
        totals["observe"] += len(observations)

    with ThreadPoolExecutor(4) as threads:
        writers = [threads.submit(write) for _ in range(4)]
        barrier.wait()
        while not all(writer.done() for writer in writers):
            drain()
    drain()
    assert totals == {"count": 2000, "observe": 2000}


def _check(families: tuple[Family, ...]) -> None:
    names = [family.name for family in families]
    assert len({*names}) == len(names)
    for family in families:
        assert family.name.startswith("tandem_") and family.help
        assert (family.kind == "counter") == family.name.endswith("_total")
        assert bool(family.label) == bool(family.values), "every label value exists from the start"
        assert list(family.buckets) == sorted(family.buckets)


def test_the_families_follow_the_naming_rules_of_prometheus() -> None:
    _check(ORCHESTRATOR_FAMILIES)
    _check(ENGINE_FAMILIES)
    assert not {f.name for f in ORCHESTRATOR_FAMILIES} & {f.name for f in ENGINE_FAMILIES}
