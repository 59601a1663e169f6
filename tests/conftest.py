"""What all tests share: one hypothesis profile under which every run draws the same examples."""

from hypothesis import settings

# No example database, no deadline: a run depends on nothing but the code, and time is not what tests judge.
settings.register_profile("deterministic", derandomize=True, database=None, deadline=None)
settings.load_profile("deterministic")
