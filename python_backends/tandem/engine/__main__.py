"""``python -m tandem.engine``"""

import os

# Before torch loads OpenMP: a thread that waits spins for about 0.1 ms, then sleeps. With the
# default, about 10 ms, it keeps the core from the thread it waits for once a core is shared with
# another process: a decode step of 50 ms took a second.
os.environ.setdefault("GOMP_SPINCOUNT", "2000")

from tandem.engine.process import main  # noqa: E402

main()
