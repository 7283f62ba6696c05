from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.models import BPE

from tandem_cli.smollm2 import fetch_smollm2, smollm2_folder, split_digits


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("1. One", ["1", ".", "ĠOne"]),
        ("room  101", ["room", "ĠĠ", "1", "0", "1"]),
        ("don't", ["don", "'t"]),
    ],
)
def test_every_digit_is_a_piece_of_its_own(text: str, pieces: list[str]) -> None:
    tokenizer = Tokenizer(BPE())
    split_digits(tokenizer)
    split = tokenizer.pre_tokenizer.pre_tokenize_str(text)
    assert [piece for piece, _ in split] == pieces


def test_converted_model_is_kept(tmp_path: Path) -> None:
    environ = {"TANDEM_CACHE": str(tmp_path)}
    folder = smollm2_folder(environ)
    folder.mkdir(parents=True)
    assert fetch_smollm2(environ) == folder == tmp_path / "models" / "SmolLM2-135M-Instruct"
