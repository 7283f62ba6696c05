"""Compiles kernels.cpp for this CPU, once: the library is kept in the cache folder."""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import shutil
import subprocess
from pathlib import Path

_SOURCE = Path(__file__).with_name("kernels.cpp")
# Sums may be reordered, so that they vectorise; nothing that changes what an infinity means.
_FLAGS = (
    "-std=c++20 -O3 -march=native -fopenmp -shared -fPIC -fno-math-errno -fno-trapping-math "
    "-fno-signed-zeros -fassociative-math -freciprocal-math"
).split()
_TIMEOUT_S = 120
_log = logging.getLogger(__name__)


def load_library() -> ctypes.CDLL | None:
    """The compiled kernels; None, and a line in the log that says why, if there are none.

    torch must have been imported: the kernels run on its OpenMP threads.
    """
    if os.environ.get("TANDEM_NATIVE_KERNELS") == "0":
        _log.info("native kernels are off (TANDEM_NATIVE_KERNELS=0); torch computes instead")
        return None
    try:
        return ctypes.CDLL(str(_library()))
    except (OSError, subprocess.SubprocessError) as error:
        detail = getattr(error, "stderr", None) or error
        _log.warning("no native kernels, torch computes instead: %s", str(detail).strip()[-500:])
        return None


def _library() -> Path:
    """Named after all that decides its content, so that it never has to be replaced."""
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None:
        raise FileNotFoundError("no C++ compiler (g++, or $CXX)")
    digest = hashlib.blake2b(digest_size=8)
    for part in (_SOURCE.read_bytes(), " ".join(_FLAGS).encode(), _cpu().encode()):
        digest.update(part)
    cache = Path(os.environ.get("TANDEM_CACHE") or Path.home() / ".cache" / "tandem")
    library = cache / "kernels" / f"{digest.hexdigest()}.so"
    if not library.exists():
        _log.info("compiling %s with %s", _SOURCE.name, compiler)
        library.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        draft = library.with_suffix(f".{os.getpid()}")
        command = [compiler, *_FLAGS, "-o", str(draft), str(_SOURCE)]
        try:
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=_TIMEOUT_S)
            draft.rename(library)  # whoever compiled at the same time made the same
        finally:
            draft.unlink(missing_ok=True)
    return library


def _cpu() -> str:
    """Model and instructions: what -march=native looks at."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    first = {line.split(":")[0].strip(): line for line in reversed(lines)}
    return first.get("model name", "") + first.get("flags", first.get("Features", ""))
