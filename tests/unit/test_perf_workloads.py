"""Workloads: exact lengths, one seed one sequence of requests, traces, arrivals."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path
from statistics import fmean

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from tandem_perf.arrivals import ClosedLoop, ConstantArrivals, PoissonArrivals, TraceArrivals
from tandem_perf.prepared_load import PreparedLoad
from tandem_perf.prompt_text import PromptText
from tandem_perf.requests import BenchRequest, RequestDigest, Session, first_requests
from tandem_perf.run_config import RunConfig
from tandem_perf.targets.base import TargetOptions
from tandem_perf.workloads import agentic, chat
from tandem_perf.workloads.base import TokenRange, WorkloadError, WorkloadOptions
from tandem_perf.workloads.registry import load_workload

SYNTHETIC = ["mixed-60-40", "mixed-60-40-3k", "mixed-60-40-8k", "chat", "shared-prefix", "agentic"]
OPTIONS = WorkloadOptions()


def requests(spec: str, count: int, seed: int = 0) -> list[BenchRequest]:
    sessions = first_requests(load_workload(spec, OPTIONS).sessions(seed), count)
    return [request for session in sessions for request in session.requests]


def ids(request: BenchRequest) -> list[int]:
    assert request.input_ids is not None
    return request.input_ids.tolist()


def digest(spec: str, seed: int, count: int = 25) -> str:
    result = RequestDigest()
    for _ in result.watch(first_requests(load_workload(spec, OPTIONS).sessions(seed), count)):
        pass
    return str(result)


@pytest.mark.parametrize("spec", SYNTHETIC)
def test_one_seed_gives_identical_requests(spec: str) -> None:
    assert digest(spec, 7) == digest(spec, 7)
    assert digest(spec, 7) != digest(spec, 8)
    assert requests(spec, 9, seed=3) == requests(spec, 9, seed=3)


@pytest.mark.parametrize("spec", SYNTHETIC)
def test_prompts_have_the_length_they_claim_and_ids_in_range(spec: str) -> None:
    for request in requests(spec, 25):
        assert len(ids(request)) == request.prompt_tokens
        assert min(ids(request)) >= OPTIONS.token_range.first
        assert max(ids(request)) < OPTIONS.token_range.last
        assert request.ignore_eos


@pytest.mark.parametrize("spec", SYNTHETIC)
def test_request_ids_are_unique(spec: str) -> None:
    assert len({request.request_id for request in requests(spec, 40)}) == 40


def test_the_digest_sees_every_part_of_a_request() -> None:
    (base,) = requests("mixed-60-40", 1)
    other = BenchRequest(
        request_id=base.request_id,
        length_class=base.length_class,
        max_tokens=base.max_tokens + 1,
        input_ids=base.input_ids,
    )
    assert base.content() != other.content()


@pytest.mark.parametrize(
    ("spec", "long"),
    [("mixed-60-40", 1024), ("mixed-60-40-3k", 3000), ("mixed-60-40-8k", 8000)],
)
def test_mixed_is_60_percent_short_and_40_percent_long(spec: str, long: int) -> None:
    lengths = [request.prompt_tokens for request in requests(spec, 50)]
    assert lengths.count(64) == 30
    assert lengths.count(long) == 20
    assert all(request.max_tokens == 32 for request in requests(spec, 50))


def test_mixed_prompts_share_nothing() -> None:
    starts = [tuple(ids(request)[:16]) for request in requests("mixed-60-40", 50)]
    assert len(set(starts)) == 50


def test_chat_lengths_are_like_sharegpt() -> None:
    sent = requests("chat", 2000)
    assert all(chat.is_kept(request.prompt_tokens, request.max_tokens) for request in sent)
    prompt_mean = fmean(request.prompt_tokens for request in sent)
    output_mean = fmean(request.max_tokens for request in sent)
    assert prompt_mean == pytest.approx(chat.MEAN_PROMPT_TOKENS, rel=0.04)
    assert output_mean == pytest.approx(chat.MEAN_OUTPUT_TOKENS, rel=0.04)


def test_shared_prefix_is_shared_and_the_rest_is_not() -> None:
    first, second = (ids(request) for request in requests("shared-prefix", 2))
    assert first[:1024] == second[:1024]
    assert first[1024:] != second[1024:]
    assert first[:1024] != ids(requests("shared-prefix", 1, seed=1)[0])[:1024]


def test_an_agent_sends_its_conversation_again() -> None:
    session = next(load_workload("agentic", OPTIONS).sessions(0))
    prompts = [ids(request) for request in session.requests]
    assert [len(prompt) for prompt in prompts] == [512, 672, 832, 992]
    for earlier, later in zip(prompts, prompts[1:], strict=False):
        assert later[: len(earlier)] == earlier
    assert session.think_times_s[0] == 0
    assert len(session.think_times_s) == agentic.NUM_TURNS
    assert min(session.think_times_s[1:]) > 0


def test_first_requests_cuts_the_last_session() -> None:
    sessions = list(first_requests(load_workload("agentic", OPTIONS).sessions(0), 6))
    assert [len(session.requests) for session in sessions] == [4, 2]


def trace_file(tmp_path: Path, *lines: object) -> Path:
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def trace_line(at_ms: int, length: int, *hash_ids: int) -> dict[str, object]:
    return {"timestamp": at_ms, "input_length": length, "output_length": 5, "hash_ids": hash_ids}


def test_mooncake_lengths_times_and_shared_blocks(tmp_path: Path) -> None:
    path = trace_file(
        tmp_path,
        trace_line(0, 1100, 0, 1, 2),
        trace_line(1500, 700, 0, 9),
        trace_line(1500, 600, 0),
    )
    sessions = list(load_workload(f"mooncake:{path}", OPTIONS).sessions(0))
    first, second, third = (ids(session.requests[0]) for session in sessions)
    assert [len(first), len(second), len(third)] == [1100, 700, 600]
    assert first[:512] == second[:512] == third[:512]
    assert first[512:700] != second[512:700]
    assert second[512:600] != third[512:600]
    assert [session.at_s for session in sessions] == [0.0, 1.5, 1.5]
    assert sessions[0].requests[0].max_tokens == 5
    assert sessions == list(load_workload(f"mooncake:{path}", OPTIONS).sessions(0))


def test_a_trace_can_be_faster_and_without_long_prompts(tmp_path: Path) -> None:
    path = trace_file(tmp_path, trace_line(1000, 4000, 1), trace_line(3000, 700, 2))
    options = WorkloadOptions(speed=2.0, max_prompt_tokens=2048)
    (session,) = load_workload(f"mooncake:{path}", options).sessions(0)
    assert session.at_s == 1.5
    assert session.requests[0].request_id == "1"


def test_a_bad_trace_line_is_named(tmp_path: Path) -> None:
    path = trace_file(tmp_path, trace_line(0, 9), {"timestamp": 0, "input_length": 0})
    with pytest.raises(WorkloadError, match="trace.jsonl:2: "):
        list(load_workload(f"mooncake:{path}", OPTIONS).sessions(0))


def test_the_users_own_requests(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    path = trace_file(
        tmp_path,
        {"prompt": "Once", "max_tokens": 3},
        {"messages": messages, "max_tokens": 4, "at_s": 0.5},
        {"input_ids": [1, 2, 3], "max_tokens": 5, "length_class": "tiny"},
    )
    sent = requests(f"jsonl:{path}", 10)
    assert sent[0].text == "Once"
    assert sent[1].messages == tuple(messages)
    assert ids(sent[2]) == [1, 2, 3]
    assert sent[2].prompt_tokens == 3
    assert [request.length_class for request in sent] == ["all", "all", "tiny"]
    assert [request.max_tokens for request in sent] == [3, 4, 5]


@pytest.mark.parametrize(
    "line", [{"max_tokens": 3}, {"prompt": "a", "input_ids": [1], "max_tokens": 1}, {"prompt": "a"}]
)
def test_a_bad_line_of_the_user_is_named(tmp_path: Path, line: dict[str, object]) -> None:
    path = trace_file(tmp_path, line)
    with pytest.raises(WorkloadError, match="trace.jsonl:1: "):
        requests(f"jsonl:{path}", 1)


@pytest.mark.parametrize("spec", ["nope", "mooncake:", "mooncake:/no/such/file", "mixed-60-40:x"])
def test_an_unknown_workload_is_named(spec: str) -> None:
    with pytest.raises(WorkloadError, match=spec):
        load_workload(spec, OPTIONS)


def some_sessions(count: int) -> list[Session]:
    return list(islice(load_workload("mixed-60-40", OPTIONS).sessions(0), count))


def test_poisson_has_its_rate_and_its_seed() -> None:
    sessions = some_sessions(1) * 4000
    times = [at_s for at_s, _ in PoissonArrivals(20.0).schedule(sessions, 5)]
    gaps = [later - earlier for earlier, later in zip(times, times[1:], strict=False)]
    assert fmean(gaps) == pytest.approx(1 / 20, rel=0.05)
    assert sum(gap > 1 / 20 for gap in gaps) / len(gaps) == pytest.approx(0.368, abs=0.03)  # 1/e
    assert times == [at_s for at_s, _ in PoissonArrivals(20.0).schedule(sessions, 5)]
    assert times != [at_s for at_s, _ in PoissonArrivals(20.0).schedule(sessions, 6)]


def test_constant_arrivals() -> None:
    times = [at_s for at_s, _ in ConstantArrivals(4.0).schedule(some_sessions(3), 0)]
    assert times == [0.0, 0.25, 0.5]


def test_trace_arrivals_count_from_the_first_and_are_in_order(tmp_path: Path) -> None:
    path = trace_file(tmp_path, trace_line(9000, 10, 1), trace_line(8000, 20, 2))
    sessions = load_workload(f"mooncake:{path}", OPTIONS).sessions(0)
    pairs = list(TraceArrivals().schedule(sessions, 0))
    assert [at_s for at_s, _ in pairs] == [0.0, 1.0]
    assert [session.requests[0].prompt_tokens for _, session in pairs] == [20, 10]


def test_a_workload_without_times_cannot_be_a_trace() -> None:
    with pytest.raises(WorkloadError, match="no arrival times"):
        list(TraceArrivals().schedule(some_sessions(1), 0))


def config(tmp_path: Path, **changes: object) -> RunConfig:
    fields = {
        "target": "openai",
        "target_options": TargetOptions(url="http://x"),
        "workload": "mixed-60-40",
        "arrivals": PoissonArrivals(10.0),
        "out_dir": tmp_path,
    }
    return RunConfig(**(fields | changes))  # type: ignore[arg-type]


def test_sixty_requests_unless_told_otherwise(tmp_path: Path) -> None:
    assert PreparedLoad(config(tmp_path)).num_requests == 60
    assert PreparedLoad(config(tmp_path, num_requests=7)).num_requests == 7


def test_a_duration_takes_all_arrivals_before_it(tmp_path: Path) -> None:
    prepared = PreparedLoad(config(tmp_path, duration_s=20.0))
    assert prepared.num_requests is not None
    assert 150 < prepared.num_requests < 250
    assert prepared.schedule[-1][0] < 20.0


def test_a_file_is_sent_whole(tmp_path: Path) -> None:
    path = trace_file(tmp_path, *[trace_line(0, 9)] * 70)
    prepared = PreparedLoad(
        config(tmp_path, workload=f"mooncake:{path}", arrivals=ClosedLoop(2))
    )
    assert prepared.num_requests == 70


def test_warm_up_prompts_are_not_those_of_the_run(tmp_path: Path) -> None:
    prepared = PreparedLoad(config(tmp_path, warm_up=3))
    warm_up = {tuple(ids(session.requests[0])) for session in prepared.warm_up_sessions()}
    run = {tuple(ids(session.requests[0])) for _, session in prepared.schedule}
    assert len(warm_up) == 3
    assert not warm_up & run


@pytest.mark.parametrize("has_bos", [False, True])
def test_text_has_the_exact_number_of_tokens(tmp_path: Path, has_bos: bool) -> None:
    tokenizer = tmp_path / "tokenizer.json"
    word_tokenizer(has_bos).save(str(tokenizer))
    prompt_text = PromptText(tokenizer)
    for session in prompt_text.sessions(some_sessions(10)):
        (request,) = session.requests
        assert request.input_ids is None
        assert request.text is not None
        assert len(Tokenizer.from_file(str(tokenizer)).encode(request.text).ids) == (
            request.prompt_tokens
        )


def test_texts_share_the_prefix_that_ids_share(tmp_path: Path) -> None:
    tokenizer = tmp_path / "tokenizer.json"
    word_tokenizer(False).save(str(tokenizer))
    sessions = load_workload("shared-prefix", OPTIONS).sessions(0)
    first, second = islice(PromptText(tokenizer).sessions(sessions), 2)
    words = [(session.requests[0].text or "").split() for session in (first, second)]
    assert words[0][:1024] == words[1][:1024]
    assert words[0] != words[1]


def word_tokenizer(has_bos: bool) -> Tokenizer:
    """A byte-level BPE that knows 300 words, each with and without a space before it."""
    alphabet = "abcdefghij"
    words = [a + b + c for a in alphabet for b in alphabet for c in "xyz"]
    tokens = ["<s>", "Ġ", *alphabet, *"xyz"]
    merges = []
    for word in words:
        for start in ("", "Ġ"):
            left = start
            for letter in word:
                if left and (left, letter) not in merges:
                    merges.append((left, letter))
                left += letter
                tokens.append(left)
    vocabulary = {token: number for number, token in enumerate(dict.fromkeys(tokens))}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if has_bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", 0)]
        )
    return tokenizer


def test_token_range_is_respected() -> None:
    options = WorkloadOptions(token_range=TokenRange(5, 7))
    session = next(load_workload("mixed-60-40", options).sessions(0))
    assert set(ids(session.requests[0])) == {5, 6}
