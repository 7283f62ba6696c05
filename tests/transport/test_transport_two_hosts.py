"""The transport's suites once more, in a pytest on one host with its exporters on another."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from transport_exporters import needs_nixl
from two_hosts import on_host, two_hosts, why_not

SUITES = ("test_transport_contract.py", "test_transport_nixl.py")


@needs_nixl
@pytest.mark.skipif(bool(why_not()), reason=why_not())
def test_nixl_between_two_hosts() -> None:
    files = [str(Path(__file__).with_name(name)) for name in SUITES]
    with two_hosts() as (near, far):
        pytest_there = [*on_host(near), sys.executable, "-m", "pytest", "-p", "no:cacheprovider"]
        result = subprocess.run(
            [*pytest_there, "-k", "far", *files],
            env=os.environ | {"TANDEM_TEST_FAR_HOST": far},
            capture_output=True,
            text=True,
            timeout=240,
        )
    assert result.returncode == 0, result.stdout + result.stderr
    (num_passed,) = re.findall(r"^(\d+) passed", result.stdout, re.MULTILINE)
    assert int(num_passed) >= 45, result.stdout
