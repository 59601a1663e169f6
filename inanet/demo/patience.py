"""How long to wait for processes on a machine that others use too.

Deadlines are made for processes that have a processor when they want one. Where several want the same, everything takes as
many times longer: a compile of 20 s takes five minutes at a load of 30 on two processors, and nothing is wrong.
"""

import os

#: how many times longer at most: every wait ends
MOST = 16.0


def patient(seconds: float) -> float:
    """``seconds``, times the runnable processes for each processor there is, of the last minute, but :data:`MOST` at most."""
    return seconds * min(max(1.0, os.getloadavg()[0] / len(os.sched_getaffinity(0))), MOST)
