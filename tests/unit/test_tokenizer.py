import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tandem.errors import ConfigError, InvalidRequest
from tandem.orchestrator.tokenizer import Tokenizer
from tiny_tokenizers import CHATML, write_byte_level, write_sentencepiece_style

HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture
def byte_level_dir(tmp_path: Path) -> Path:
    write_byte_level(tmp_path)
    return tmp_path


def _edit_config(model_dir: Path, **changes: Any) -> None:
    path = model_dir / "tokenizer_config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps(config))


def _chat_text(tokenizer: Tokenizer, messages: list[dict[str, str]]) -> str:
    return "".join(
        piece
        for token_id in tokenizer.encode_chat(messages)
        if (piece := tokenizer.piece(token_id)) is not None
    )


def test_text_gets_the_special_tokens_of_its_model(tmp_path: Path) -> None:
    write_sentencepiece_style(tmp_path)
    tokenizer = Tokenizer(tmp_path)
    plain = tokenizer.encode("hello", add_special_tokens=False)
    assert tokenizer.encode("hello") == [1, *plain]
    assert tokenizer.decode(tokenizer.encode("hello the world")) == "hello the world"


def test_a_chat_follows_the_template_of_its_model(byte_level_dir: Path) -> None:
    tokenizer = Tokenizer(byte_level_dir)
    expected = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.encode_chat(HELLO) == tokenizer.encode(expected, add_special_tokens=False)


def test_a_template_knows_the_special_tokens_and_gets_bos_once(tmp_path: Path) -> None:
    write_sentencepiece_style(tmp_path)
    token_ids = Tokenizer(tmp_path).encode_chat(HELLO)
    assert token_ids.count(1) == 1
    assert token_ids[0] == 1


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "assistant", "content": "hello"}],
        [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}],
    ],
)
def test_what_a_template_refuses_is_an_invalid_request(
    tmp_path: Path, messages: list[dict[str, str]]
) -> None:
    write_sentencepiece_style(tmp_path)
    with pytest.raises(InvalidRequest, match="messages: .*roles must alternate"):
        Tokenizer(tmp_path).encode_chat(messages)


def test_a_template_that_fails_is_an_invalid_request(byte_level_dir: Path) -> None:
    _edit_config(byte_level_dir, chat_template="{{ messages[3]['content'] + 1 }}")
    with pytest.raises(InvalidRequest, match="messages: "):
        Tokenizer(byte_level_dir).encode_chat(HELLO)


def test_a_model_without_a_template_says_so(byte_level_dir: Path) -> None:
    _edit_config(byte_level_dir, chat_template=None)
    with pytest.raises(InvalidRequest, match="messages: this model has no chat template"):
        Tokenizer(byte_level_dir).encode_chat(HELLO)


def test_the_default_of_several_templates_is_used(byte_level_dir: Path) -> None:
    templates = [{"name": "tool_use", "template": "x"}, {"name": "default", "template": "hello"}]
    _edit_config(byte_level_dir, chat_template=templates)
    assert _chat_text(Tokenizer(byte_level_dir), HELLO) == "hello"


def test_a_jinja_file_comes_before_the_config(byte_level_dir: Path) -> None:
    (byte_level_dir / "chat_template.jinja").write_text("{{ eos_token }}123")
    assert CHATML in json.loads((byte_level_dir / "tokenizer_config.json").read_text()).values()
    assert _chat_text(Tokenizer(byte_level_dir), HELLO) == "123"


def test_a_stored_truncation_or_padding_is_ignored(byte_level_dir: Path) -> None:
    path = byte_level_dir / "tokenizer.json"
    stored = json.loads(path.read_text()) | {
        "truncation": {
            "direction": "Right",
            "max_length": 2,
            "strategy": "LongestFirst",
            "stride": 0,
        }
    }
    path.write_text(json.dumps(stored))
    tokenizer = Tokenizer(byte_level_dir)
    assert tokenizer.decode(tokenizer.encode("hello the world")) == "hello the world"


def test_decoding_leaves_special_tokens_out(byte_level_dir: Path) -> None:
    tokenizer = Tokenizer(byte_level_dir)
    assert tokenizer.decode(tokenizer.encode("<|im_start|>hello<|im_end|>")) == "hello"
    assert tokenizer.piece(tokenizer.encode("<|im_end|>")[0]) is None
    assert tokenizer.piece(tokenizer.vocab_size) is None
    assert tokenizer.piece(tokenizer.vocab_size - 1) is not None


def test_a_directory_without_a_tokenizer_stops_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        Tokenizer(tmp_path)


def test_the_orchestrator_needs_no_torch() -> None:
    modules = ["tokenizer", "detokenizer", "contract", "sampling_defaults", "prefix_index"]
    imports = "; ".join(f"import tandem.orchestrator.{module}" for module in modules)
    code = f"import sys; {imports}; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
