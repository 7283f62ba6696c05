from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.orchestrator.detokenizer import IncrementalDetokenizer
from tandem.orchestrator.tokenizer import Tokenizer
from tiny_tokenizers import write_byte_level, write_sentencepiece_style

REPLACEMENT = "\ufffd"
NUM_IDS = 400  # more than either vocabulary has, so unknown ids are among them


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return _written(write_byte_level, tmp_path_factory.mktemp("byte_level"))


@pytest.fixture(scope="module")
def sentencepiece(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return _written(write_sentencepiece_style, tmp_path_factory.mktemp("sentencepiece"))


@pytest.fixture(scope="module", params=["byte_level", "sentencepiece"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    found: Tokenizer = request.getfixturevalue(request.param)
    return found


def _written(write: Callable[[Path], None], directory: Path) -> Tokenizer:
    write(directory)
    return Tokenizer(directory)


def _pieces(tokenizer: Tokenizer, token_ids: list[int]) -> list[str]:
    detokenizer = IncrementalDetokenizer(tokenizer)
    return [*(detokenizer.push([token_id]) for token_id in token_ids), detokenizer.finish()]


@given(token_ids=st.lists(st.integers(0, NUM_IDS), max_size=40))
@settings(max_examples=150)
def test_the_pieces_of_any_tokens_join_to_their_text(
    tokenizer: Tokenizer, token_ids: list[int]
) -> None:
    assert "".join(_pieces(tokenizer, token_ids)) == tokenizer.decode(token_ids)


@given(data=st.binary(max_size=40))
@settings(max_examples=80)
def test_any_bytes_join_to_their_text(sentencepiece: Tokenizer, data: bytes) -> None:
    token_ids = [3 + byte for byte in data]  # <0x00> has id 3
    assert sentencepiece.piece(3 + 0x41) == "<0x41>"
    assert "".join(_pieces(sentencepiece, token_ids)) == sentencepiece.decode(token_ids)


@given(text=st.text(max_size=30), cuts=st.lists(st.integers(1, 5), max_size=30))
@settings(max_examples=80)
def test_several_tokens_at_once_give_the_same_text(
    tokenizer: Tokenizer, text: str, cuts: list[int]
) -> None:
    token_ids = tokenizer.encode(text)
    detokenizer = IncrementalDetokenizer(tokenizer)
    shown, rest = "", token_ids
    for length in cuts:
        shown, rest = shown + detokenizer.push(rest[:length]), rest[length:]
    assert shown + detokenizer.push(rest) + detokenizer.finish() == tokenizer.decode(token_ids)


@given(text=st.text(alphabet="aé你好🙂👩‍👧e\u0301क\u094d ", max_size=20))
@settings(max_examples=80)
def test_no_character_is_shown_in_halves(tokenizer: Tokenizer, text: str) -> None:
    pieces = _pieces(tokenizer, tokenizer.encode(text))
    assert "".join(pieces) == tokenizer.decode(tokenizer.encode(text))
    assert REPLACEMENT not in "".join(pieces)


def test_spaces_come_with_the_word_after_them(sentencepiece: Tokenizer) -> None:
    token_ids = sentencepiece.encode("hello the  world", add_special_tokens=False)
    assert _pieces(sentencepiece, token_ids) == ["hello", " the", " ", " world", ""]


def test_a_special_token_between_words_does_not_eat_the_space(sentencepiece: Tokenizer) -> None:
    bos, hello = sentencepiece.encode("hello")
    assert _pieces(sentencepiece, [bos, hello, bos, hello, bos]) == [
        "",
        "hello",
        "",
        " hello",
        "",
        "",
    ]


def test_a_character_is_shown_as_soon_as_it_is_whole(byte_level: Tokenizer) -> None:
    token_ids = [token_id for byte in "é".encode() for token_id in _byte_tokens(byte_level, byte)]
    assert _pieces(byte_level, token_ids) == ["", "é", ""]


def test_a_run_of_fallback_bytes_is_shown_when_it_ends(sentencepiece: Tokenizer) -> None:
    smile = [3 + byte for byte in "🙂".encode()]
    a = sentencepiece.encode("a", add_special_tokens=False)
    assert _pieces(sentencepiece, [*smile, *a]) == ["", "", "", "", "🙂 a", ""]
    assert _pieces(sentencepiece, smile) == ["", "", "", "", "🙂"]


def test_one_bad_byte_spoils_the_whole_run_of_fallback_bytes(sentencepiece: Tokenizer) -> None:
    token_ids = [3 + byte for byte in "🙂".encode() + b"\xff"]
    assert _pieces(sentencepiece, token_ids)[-1] == REPLACEMENT * 5


def test_an_incomplete_character_shows_only_at_the_end(byte_level: Tokenizer) -> None:
    (token_id,) = _byte_tokens(byte_level, 0xE4)
    assert _pieces(byte_level, [token_id]) == ["", REPLACEMENT]


def test_long_runs_of_broken_bytes_are_not_held_back(byte_level: Tokenizer) -> None:
    (token_id,) = _byte_tokens(byte_level, 0x80)
    detokenizer = IncrementalDetokenizer(byte_level)
    assert detokenizer.push([token_id] * 10_000) == REPLACEMENT * 10_000


def test_an_added_token_that_is_not_special_is_text(byte_level: Tokenizer) -> None:
    token_ids = byte_level.encode("<think>hello")
    assert _pieces(byte_level, token_ids) == ["<think>", "hello", ""]


class _CountingTokenizer(Tokenizer):
    """Counts the tokens it decodes."""

    num_decoded = 0

    def decode(self, token_ids: object) -> str:
        assert isinstance(token_ids, list)
        self.num_decoded += len(token_ids)
        return super().decode(token_ids)


@pytest.mark.parametrize("text", ["hello the world ", "🙂", "   ", "é你"])
def test_the_cost_of_a_token_does_not_grow(tmp_path: Path, text: str) -> None:
    write_sentencepiece_style(tmp_path)
    tokenizer = _CountingTokenizer(tmp_path)
    token_ids = tokenizer.encode(text * 200)
    _pieces(tokenizer, token_ids)
    assert tokenizer.num_decoded < 8 * len(token_ids)


def _byte_tokens(tokenizer: Tokenizer, byte: int) -> list[int]:
    """The token of one byte in a byte-level vocabulary, through the text it stands for alone."""
    found = [i for i in range(tokenizer.vocab_size) if tokenizer.piece(i) == _char_of(byte)]
    assert len(found) == 1
    return found


def _char_of(byte: int) -> str:
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    if byte in printable:
        return chr(byte)
    return chr(0x100 + [b for b in range(256) if b not in printable].index(byte))
