"""``tandem fetch``: puts Triton or the small model into the cache folder."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer


class Artifact(StrEnum):
    TRITON = "triton"
    SMOLLM2 = "smollm2"


def fetch(
    artifact: Annotated[Artifact, typer.Argument(help="What to fetch.")],
) -> None:
    """Download an artifact into the cache folder; prints its path.

    The folder is $TANDEM_CACHE or ~/.cache/tandem. What is there already is kept.
    """
    if artifact is Artifact.TRITON:
        from tandem_cli.triton import fetch_triton as fetch_artifact
    else:
        from tandem_cli.smollm2 import fetch_smollm2 as fetch_artifact
    print(fetch_artifact())
