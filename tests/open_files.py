"""What this process has open and mapped, told apart so that what others close in between changes nothing.

The collector may close what earlier tests have left, at any time: to compare two counts would count that too.
"""

import os
from pathlib import Path


def open_files() -> set[tuple[int, int, int]]:
    """Number, device and inode of every open descriptor. What is in a later set only was opened in between."""
    found = set()
    for number in map(int, os.listdir("/proc/self/fd")):
        try:
            status = os.fstat(number)
        except OSError:
            # of the listing itself
            continue
        found.add((number, status.st_dev, status.st_ino))
    return found


def mapped_inodes(name: str) -> set[int]:
    """Inodes of all mapped files whose path contains ``name``."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {int(line.split(maxsplit=5)[4]) for line in lines if name in line}
