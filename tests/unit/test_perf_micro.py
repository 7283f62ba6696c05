"""The micro-benchmarks: their floors by hand, their clockwork, and each one with tiny sizes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from tandem_perf.machine import this_machine
from tandem_perf.micro import handle, orchestrator, scheduler, transport
from tandem_perf.micro.__main__ import app
from tandem_perf.micro.figure import (
    Bound,
    Figure,
    MicroOptions,
    MicroReport,
    rate_figure,
    time_figure,
)
from tandem_perf.micro.floors import (
    ModelShape,
    Peaks,
    Slice,
    Work,
    decode_step,
    floor_of,
    prefill_steps,
    step_work,
)
from tandem_perf.micro.parts import NAMES
from tandem_perf.micro.tables import noise_warnings
from tandem_perf.micro.timing import Spread, Timing, time_repeats
from tiny_tokenizers import write_byte_level

SHAPE = ModelShape(
    body_params=1000,
    head_params=100,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    item_bytes=2,
)


# ---- floors ----------------------------------------------------------------------------------


def test_kv_bytes_of_a_token() -> None:
    assert SHAPE.kv_token_bytes == 2 * 2 * 2 * 8 * 2  # K and V, layers, heads, dim, bytes
    smollm2 = replace(SHAPE, num_layers=30, num_kv_heads=3, head_dim=64)
    assert smollm2.kv_token_bytes == 23_040  # bf16, as measured on the server


@pytest.mark.parametrize(
    ("query_len", "context_len", "pairs"),
    [(1, 1, 1), (1, 10, 10), (3, 3, 1 + 2 + 3), (3, 5, 3 + 4 + 5)],
)
def test_causal_pairs(query_len: int, context_len: int, pairs: int) -> None:
    assert Slice(query_len, context_len).num_pairs == pairs


def test_work_of_a_decode_step() -> None:
    work = decode_step(SHAPE, batch=3, context_len=10)
    # All weights once, and 10 tokens of KV for each of 3 sequences.
    assert work.num_bytes == 1100 * 2 + 3 * 10 * 128
    # 2 FLOPs per parameter and token; attention 4 per (pair, layer, head, dim).
    assert work.flops == 2 * 1100 * 3 + 4 * (3 * 10) * 2 * 4 * 8


def test_work_of_a_chunk_without_its_last_token_has_no_head() -> None:
    work = step_work(SHAPE, [Slice(4, 6)], num_sampled=0)
    assert work.num_bytes == 1000 * 2 + 6 * 128
    assert work.flops == 2 * 1000 * 4 + 4 * (3 + 4 + 5 + 6) * 2 * 4 * 8


def test_a_prompt_in_chunks_reads_the_weights_once_a_chunk() -> None:
    steps = prefill_steps(SHAPE, prompt_len=10, chunk=4)
    assert steps == [
        step_work(SHAPE, [Slice(4, 4)], 0),
        step_work(SHAPE, [Slice(4, 8)], 0),
        step_work(SHAPE, [Slice(2, 10)], 1),
    ]
    whole = prefill_steps(SHAPE, prompt_len=10, chunk=10)
    assert whole == [step_work(SHAPE, [Slice(10, 10)], 1)]
    assert sum(s.flops for s in steps) == whole[0].flops, "chunks compute nothing twice"
    assert len(prefill_steps(SHAPE, prompt_len=8, chunk=4)) == 2


def test_a_step_takes_its_bytes_or_its_flops() -> None:
    peaks = Peaks(bytes_per_s=100.0, flops_per_s=1000.0)
    by_bytes = floor_of([Work(num_bytes=200, flops=500)], peaks)
    assert (by_bytes.seconds, by_bytes.reason) == (2.0, "bytes")
    by_flops = floor_of([Work(num_bytes=200, flops=5000)], peaks)
    assert (by_flops.seconds, by_flops.reason) == (5.0, "FLOPs")
    both = floor_of([Work(num_bytes=200, flops=500), Work(num_bytes=200, flops=5000)], peaks)
    assert (both.seconds, both.reason) == (7.0, "FLOPs")


# ---- timing ----------------------------------------------------------------------------------


class Ticks:
    """A clock that tells the given times in turn."""

    def __init__(self, times_s: Sequence[float]) -> None:
        self._times_s = iter(times_s)

    def __call__(self) -> float:
        return next(self._times_s)


def test_repeats_without_the_warm_up() -> None:
    wall = Ticks([0, 100, 200, 203, 300, 301, 400, 402])  # 100 (warm-up), 3, 1, 2 seconds
    cpu = Ticks([0, 100, 200, 201, 300, 301, 400, 401])  # 1 second each
    calls: list[str] = []
    timing = time_repeats(
        lambda: calls.append("work"),
        3,
        loops=2,
        prepare=lambda: calls.append("prepare"),
        wall=wall,
        cpu=cpu,
    )
    assert calls == ["prepare", "work", "work"] * 4
    assert timing.seconds == (1.5, 0.5, 1.0)
    assert timing.cpu_seconds == (0.5, 0.5, 0.5)
    assert (timing.best_s, timing.best_cpu_s, timing.busy) == (0.5, 0.5, 0.5)


def figure(busy: float = 1.0) -> Figure:
    timing = Timing(seconds=(0.5, 1.0, 2.0), cpu_seconds=(0.25, 0.5, 0.5))
    made = time_figure("p", "w", "ms", timing, 1e3, Bound(value=200, reason="r"))
    return msgspec.structs.replace(made, busy=busy)


def test_a_time_beside_its_floor() -> None:
    found = figure()
    assert found.wall == Spread(median=1000, min=500, max=2000, repeats=3)
    assert found.cpu == Spread(median=500, min=250, max=500, repeats=3)
    assert found.times_bound(found.wall.median) == 5


def test_a_rate_beside_its_ceiling() -> None:
    timing = Timing(seconds=(0.5, 1.0, 2.0), cpu_seconds=(0.25, 0.5, 0.5))
    found = rate_figure("p", "w", "GB/s", timing, 3, Bound(value=12, reason="r"))
    assert found.wall == Spread(median=3, min=1.5, max=6, repeats=3)
    assert found.cpu == Spread(median=6, min=6, max=12, repeats=3)
    assert found.times_bound(found.wall.median) == 4


def test_noise_is_said() -> None:
    machine = this_machine()
    quiet = msgspec.structs.replace(machine, cores=2, load_average=(2.0, 0.0, 0.0))
    loud = msgspec.structs.replace(quiet, load_average=(7.0, 0.0, 0.0))
    assert list(noise_warnings(quiet, quiet, [figure()])) == []
    (warning,) = noise_warnings(quiet, loud, [figure()])
    assert "2.0 before and 7.0 after on 2 cores" in warning
    figures = [figure(), figure(busy=0.5), figure(busy=0.7)]
    (warning,) = noise_warnings(quiet, quiet, figures)
    assert "p: had a core only 50% of the time" in warning


# ---- each benchmark, tiny --------------------------------------------------------------------


@pytest.fixture
def options(tmp_path: Path) -> MicroOptions:
    write_byte_level(tmp_path)
    return MicroOptions(model_dir=tmp_path, dtype="float32", threads=1, repeats=2)


def check(figures: list[Figure], part: str) -> None:
    for found in figures:
        assert (found.part, found.wall.repeats) == (part, 2)
        for measured in (found.wall, found.cpu):
            assert 0 < measured.min <= measured.median <= measured.max
        assert found.bound.value > 0
    assert len({found.what for found in figures}) == len(figures)


def test_handle(options: MicroOptions) -> None:
    figures = list(handle.measure(options, loops=3))
    check(figures, "handle")
    assert [f.what for f in figures] == [
        f"{action}, {n} block ids" for n in (16, 1024) for action in ("sign", "verify")
    ]


def test_scheduler(options: MicroOptions) -> None:
    sizes = scheduler.SchedulerSizes(decoding=10, waiting=(0, 3), prompt_len=40)
    figures = list(scheduler.measure(options, sizes))
    check(figures, "scheduler")
    assert [f.what.partition(": ")[2] for f in figures[::2]] == [
        "10 decoding, 0 waiting",
        "10 decoding, 3 waiting",
    ]


def test_orchestrator(options: MicroOptions) -> None:
    sizes = orchestrator.OrchestratorSizes(streams=3, steps=4, pauses_s=(0.0, 0.001))
    figures = list(orchestrator.measure(options, sizes))
    check(figures, "orchestrator")
    assert len(figures) == 2


def test_every_stream_of_the_orchestrator_gets_one_token_a_step() -> None:
    sizes = orchestrator.OrchestratorSizes(streams=3, steps=2)
    decode = msgspec.msgpack.decode
    messages = [decode(payload) for payload in orchestrator.step_payloads(sizes, vocab_size=50)]
    assert [[t[0] for t in m["tokens"]] for m in messages] == [["s0", "s1", "s2"]] * 2
    assert [{t[1] for t in m["tokens"]} for m in messages] == [{0}, {1}]
    assert [{t[4] for t in m["tokens"]} for m in messages] == [{None}, {"length"}]


def test_transport(options: MicroOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "TRANSPORTS", ("shm", "elsewhere"))
    sizes = transport.TransportSizes(
        {"small": 5000, "larger": 20_000},
        pull_bytes=100_000,
        timed_bytes=(1 << 20, 2 << 20),
        timed_block_bytes=1 << 18,
    )
    figures = list(transport.measure(options, sizes))
    check(figures, "transport")
    assert [f.what.split(" blocks")[0] for f in figures] == [
        "shm, 20 contiguous",
        "shm, 20 scattered",
        "shm, 5 contiguous",
        "shm, 5 scattered",
        "shm, a pull of 1 MiB",
        "shm, a pull of 2 MiB",
        "shm, a pull of nothing",
    ]
    assert [f.unit for f in figures] == ["GB/s"] * 4 + ["ms", "ms", "µs"]


# ---- the command -----------------------------------------------------------------------------


def test_the_command_prints_a_table_and_writes_json(options: MicroOptions, tmp_path: Path) -> None:
    out = tmp_path / "micro.json"
    arguments = ["handle", "--model", str(options.model_dir), "--repeats", "1", "--out", str(out)]
    result = CliRunner(env={"COLUMNS": "140"}).invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert "verify, 1024 block ids" in result.output and "HMAC-SHA256" in result.output
    report = msgspec.json.decode(out.read_bytes(), type=MicroReport)
    assert len(report.figures) == 4 and report.machine.cores >= 1


def test_only_the_engine_needs_torch() -> None:
    parts = ", ".join(name for name in NAMES if name != "engine")
    program = f"import sys; from tandem_perf.micro import __main__, {parts}; print(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert "torch" not in run.stdout.split()


def test_an_unknown_part_is_refused() -> None:
    result = CliRunner().invoke(app, ["gpu"])
    assert result.exit_code == 2 and "'gpu'" in result.output


def test_a_model_that_is_not_there_is_an_error_of_one_line(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["orchestrator", "--model", str(tmp_path / "none")])
    assert result.exit_code == 1
    assert "error:" in result.output and "Traceback" not in result.output
