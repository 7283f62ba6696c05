"""Here so that pytest puts this folder on sys.path: tests import ``tiny_tokenizers`` from it."""

from hypothesis import HealthCheck, settings

# Tests are not timed: CI has two cores, and the first text a fresh clone draws takes seconds.
settings.register_profile("tandem", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("tandem")
