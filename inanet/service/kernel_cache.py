"""Where compiled kernels are kept: where numba finds a place, or else in a private temporary directory.

Looks where numba looks, without importing it. To be called before the data plane is imported, which compiles.
"""

import os
import stat
import tempfile
from pathlib import Path

from inanet.service.exits import Exit, Failure

VARIABLE = "NUMBA_CACHE_DIR"
#: what mends a missing or passing cache
FIX = f"export {VARIABLE}=/var/cache/inanet   # any directory this user may write"
_PREFIX = "inanet-kernels-"


def places() -> list[Path]:
    """The directories that numba tries, in order."""
    wanted = os.environ.get(VARIABLE)
    kernels = Path(__file__).parents[1] / "kernels"
    # expanduser leaves ~ in place where nobody knows the home directory
    home = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
    return [*([Path(wanted)] if wanted else []), kernels / "__pycache__", home / "numba"]


def writable(place: Path) -> bool:
    """Whether files can be made in a directory, or in the nearest one above it that exists."""
    while not place.exists() and place != place.parent:
        place = place.parent
    try:
        with tempfile.TemporaryFile(dir=place):
            return True
    except OSError:
        return False


def is_temporary(place: Path) -> bool:
    """Whether :func:`ensure` made this directory, here or in a parent process."""
    return place.name.startswith(_PREFIX) and place.parent == Path(tempfile.gettempdir())


def ensure() -> str:
    """See to it that kernels can be kept. Returns what to tell the user, empty if all is well.

    If nothing is writable, sets NUMBA_CACHE_DIR, for child processes too, to a directory that no other user can write:
    compiled kernels are code that is run. Raises :class:`Failure` if there cannot be one.
    """
    if any(map(writable, places())):
        return ""
    try:
        directory = _private(Path(tempfile.gettempdir()))
    except OSError as error:
        failure = Failure(f"there is no directory to keep compiled kernels in ({error.strerror}): {FIX}")
        failure.code = Exit.PERMISSION
        raise failure from None
    os.environ[VARIABLE] = str(directory)
    return f"compiled kernels are kept in {directory} for now: set {VARIABLE} to a lasting directory you may write to"


def _private(base: Path) -> Path:
    """This user's directory below ``base``, or a new one if somebody else has put something in its place."""
    directory = base / f"{_PREFIX}{os.geteuid()}"
    try:
        directory.mkdir(0o700)
    except FileExistsError:
        found = directory.lstat()
        if (
            not stat.S_ISDIR(found.st_mode)
            or found.st_uid != os.geteuid()
            or stat.S_IMODE(found.st_mode) & 0o077
        ):
            return Path(tempfile.mkdtemp(prefix=f"{directory.name}-", dir=base))
    return directory
