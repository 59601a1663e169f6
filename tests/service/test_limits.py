"""An error names the limit of the process that was reached."""

import errno
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from inanet.config.fields import read_token
from inanet.service.exits import explain
from inanet.service.limits import reason_of


@contextmanager
def limited(which: int, soft: int) -> Iterator[None]:
    """This process has a lower limit."""
    before = resource.getrlimit(which)
    resource.setrlimit(which, (soft, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(which, before)


def test_each_limit_is_named() -> None:
    with limited(resource.RLIMIT_FSIZE, 1 << 20):
        assert reason_of(OSError(errno.EFBIG, "File too large")) == (
            "File too large: this process may make files of 1 MiB (ulimit -f; LimitFSIZE= of a unit)"
        )
    assert "fs.file-max" in reason_of(OSError(errno.ENFILE, "Too many open files in system"))
    assert reason_of(OSError(errno.EIO, "Input/output error")) == "Input/output error"


def test_a_process_without_descriptors_says_so_and_not_that_a_file_is_wrong(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("0123456789abcdef")
    free = os.dup(0)
    os.close(free)
    with limited(resource.RLIMIT_NOFILE, free):
        with pytest.raises(ValueError, match=rf"may have {free} descriptors \(ulimit -n; LimitNOFILE="):
            read_token(str(tmp_path / "token"))
        with pytest.raises(OSError, match="Too many open files") as caught:
            (tmp_path / "token").read_text()
    assert "descriptor" in explain(caught.value)[1]
