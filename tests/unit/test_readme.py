"""The README names every setting and every metric, with the default that the code has."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest

from tandem.config import EngineSettings, OrchestratorSettings, PreprocessSettings
from tandem.metrics import ENGINE_FAMILIES, ORCHESTRATOR_FAMILIES
from tandem.orchestrator.contract_fields import FIELDS

README = (Path(__file__).parents[2] / "README.md").read_text()
SETTINGS = [
    field
    for kind in (EngineSettings, OrchestratorSettings, PreprocessSettings)
    for field in msgspec.structs.fields(kind)
]


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda field: field.name)
def test_every_setting_is_in_a_table(setting: msgspec.structs.FieldInfo) -> None:
    table = [row for row in README.splitlines() if row.startswith("|")]
    rows = [row for row in table if f"`{setting.name}`" in row]
    assert rows
    if isinstance(setting.default, int | float):
        shown = re.sub("−", "-", " ".join(rows))
        assert re.search(rf"(?<![\d.]){re.escape(f'{setting.default:g}')}(?![\d.])", shown) or (
            str(setting.default) in shown
        )


@pytest.mark.parametrize("family", [*ORCHESTRATOR_FAMILIES, *ENGINE_FAMILIES], ids=lambda f: f.name)
def test_every_metric_is_in_the_table(family: object) -> None:
    assert f"`{family.name}" in README


@pytest.mark.parametrize("name", FIELDS)
def test_every_input_is_in_the_table(name: str) -> None:
    assert f"`{name}`" in README
