"""``python -m tandem.engine``"""

import os

# Before torch loads OpenMP. Threads that spin while they wait take the cores from Triton and from
# the other engines: measured on two shared cores, a decode step of 58 ms took a second.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

from tandem.engine.process import main  # noqa: E402

main()
