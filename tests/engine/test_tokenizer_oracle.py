"""The torch-free tokenizer against transformers' AutoTokenizer."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from jinja2 import TemplateError
from transformers import AutoTokenizer

from tandem.errors import InvalidRequest
from tandem.orchestrator.detokenizer import IncrementalDetokenizer
from tandem.orchestrator.tokenizer import Tokenizer
from tiny_tokenizers import write_byte_level, write_sentencepiece_style

CACHE = Path(os.environ.get("TANDEM_CACHE") or Path.home() / ".cache" / "tandem")
SMOLLM2 = CACHE / "models" / "SmolLM2-135M-Instruct"

TEXTS = [
    "hello the world",
    " leading and trailing ",
    "  two\n\n\nlines\t and room  101",
    "1. One 2. Two 1234567890",
    "naïve café, 你好, 🙂👩‍👧, e\u0301, क्षि",
    "<|im_start|>user\nhello<|im_end|> <s> </s> <think>",
    "def f(x):\n    return x ** 2  # ok",
]
CHATS = [
    [{"role": "user", "content": "hello the world"}],
    [
        {"role": "user", "content": " What is 1 + 1? "},
        {"role": "assistant", "content": "2, 你好"},
        {"role": "user", "content": "🙂\n"},
    ],
]
SYSTEM_CHAT = [{"role": "system", "content": "Be brief."}, *CHATS[0]]


def _tiny(write: Callable[[Path], None]) -> Callable[[Path], Path]:
    def written(directory: Path) -> Path:
        write(directory)
        return directory

    return written


def _smollm2(directory: Path) -> Path:
    if not (SMOLLM2 / "tokenizer.json").is_file():
        pytest.skip(f"no model in {SMOLLM2}: run `tandem fetch smollm2`")
    return SMOLLM2


@pytest.fixture(
    scope="module",
    params=[_tiny(write_byte_level), _tiny(write_sentencepiece_style), _smollm2],
    ids=["byte_level", "sentencepiece", "smollm2"],
)
def model_dir(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    found: Path = request.param(tmp_path_factory.mktemp("tokenizer"))
    return found


@pytest.fixture(scope="module")
def oracle(model_dir: Path) -> Any:
    return AutoTokenizer.from_pretrained(model_dir)


@pytest.fixture(scope="module")
def tokenizer(model_dir: Path) -> Tokenizer:
    return Tokenizer(model_dir)


@pytest.mark.parametrize("text", TEXTS)
def test_plain_text_has_the_same_tokens(tokenizer: Tokenizer, oracle: Any, text: str) -> None:
    assert tokenizer.encode(text) == oracle(text)["input_ids"]


@pytest.mark.parametrize("messages", CHATS)
def test_a_chat_has_the_same_tokens(
    tokenizer: Tokenizer, oracle: Any, messages: list[dict[str, str]]
) -> None:
    expected = oracle.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    assert tokenizer.encode_chat(messages) == expected


def test_a_system_message_has_the_same_tokens_or_is_refused_by_both(
    tokenizer: Tokenizer, oracle: Any
) -> None:
    try:
        expected = oracle.apply_chat_template(SYSTEM_CHAT, add_generation_prompt=True)
    except TemplateError as error:
        with pytest.raises(InvalidRequest, match=f"messages: .*{error}"):
            tokenizer.encode_chat(SYSTEM_CHAT)
    else:
        assert tokenizer.encode_chat(SYSTEM_CHAT) == expected["input_ids"]


@pytest.mark.parametrize("text", TEXTS)
def test_decoding_gives_the_same_text(tokenizer: Tokenizer, oracle: Any, text: str) -> None:
    token_ids = oracle(text)["input_ids"]
    expected = oracle.decode(token_ids, skip_special_tokens=True)
    assert tokenizer.decode(token_ids) == expected
    detokenizer = IncrementalDetokenizer(tokenizer)
    shown = [detokenizer.push([token_id]) for token_id in token_ids]
    assert "".join([*shown, detokenizer.finish()]) == expected


def test_the_vocabulary_has_the_same_size(tokenizer: Tokenizer, oracle: Any) -> None:
    assert tokenizer.vocab_size == len(oracle)
