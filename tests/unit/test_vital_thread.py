"""What an engine cannot live without ends its process when it fails."""

import subprocess
import sys
import textwrap

from tandem.engine.vital_thread import EXIT_CODE


def run(script: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", textwrap.dedent(script)]
    return subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)


def test_a_lease_timer_that_fails_takes_the_engine_along() -> None:
    end = run("""
        import threading
        from tandem.engine.lease_timer import LeaseTimer

        class Board:
            def wait_for_leases(self, timeout_s):
                return True

            def collect(self):
                raise RuntimeError("a torn slot")

        LeaseTimer(Board(), print).start()
        threading.Event().wait(20)
    """)
    assert end.returncode == EXIT_CODE
    assert "thread lease-timer has failed" in end.stderr and "a torn slot" in end.stderr


def test_a_thread_that_ends_takes_nothing_along() -> None:
    end = run("""
        from tandem.engine.vital_thread import VitalThread
        thread = VitalThread(lambda: print("ran"), name="t")
        thread.start()
        thread.join(20)
        print("still here")
    """)
    assert (end.returncode, end.stdout) == (0, "ran\nstill here\n")
