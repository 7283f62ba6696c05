"""stdlib logging of a stub: to stderr, where Triton's own log goes."""

from __future__ import annotations

import logging


def set_up_logging(level: str, instance: str) -> None:
    """``pb_utils.Logger`` is documented for the model's three calls only; we log from threads."""
    logging.basicConfig(
        level=level, format=f"%(asctime)s {instance} %(levelname)s %(name)s: %(message)s"
    )
