"""Exit codes, the same for every command, and which error leads to which.

The codes follow the LSB init script actions, so that systemd shows a name for them and units can say
``RestartPreventExitStatus=2 4 5``: restarting does not mend a configuration, a permission or a missing
package.
"""

import shlex
import sys
from enum import IntEnum

from inanet.service.limits import reason_of

#: Packages of the optional extras, by the module whose import fails.
EXTRAS = {
    "sklearn": "demo",
    "rich": "ui",
    "cryptography": "tls",
    "pyroute2": "net",
    "torch": "torch",
    "scipy": "plan",
    "networkx": "plan",
    "scapy": "dissect",
    "mpi4py": "bench",
    "matplotlib": "bench",
}
#: Modules of the dependencies that a complete installation has.
_CORE = frozenset(
    {
        "numpy",
        "numba",
        "msgpack",
        "pydantic",
        "structlog",
        "uvloop",
        "click",
        "prometheus_client",
        "psutil",
        "h11",
    }
)


class Exit(IntEnum):
    """How a command ended."""

    OK = 0
    FAILED = 1
    #: wrong command line or configuration
    USAGE = 2
    PERMISSION = 4
    #: an optional package is not installed
    MISSING = 5
    #: an error nobody foresaw
    BUG = 70
    #: what shells make of a command that Ctrl-C ended
    INTERRUPTED = 130


class Failure(Exception):
    """An expected failure. The message tells the user what happened, to whom and what to do; no traceback is
    shown.
    """

    code: Exit = Exit.FAILED


def pip_install(what: str) -> str:
    """The command that installs ``what`` where this program runs, which the ``pip`` of a shell need not do."""
    return f"{shlex.quote(sys.executable)} -m pip install {what}"


def extra(name: str) -> str:
    """The command that installs the packages of an extra."""
    return pip_install(f"'inanet[{name}]'")


def explain(error: BaseException) -> tuple[Exit, str]:
    """The exit code for an error that ended a command, and the sentence to show for it."""
    if isinstance(error, Failure):
        return error.code, str(error)
    if isinstance(error, KeyboardInterrupt):
        return Exit.INTERRUPTED, "interrupted"
    if isinstance(error, PermissionError):
        return Exit.PERMISSION, f"permission denied: {_os_error(error)}"
    if isinstance(error, ImportError):
        return _missing(error)
    if isinstance(error, OSError):
        return Exit.FAILED, _os_error(error)
    if isinstance(error, MemoryError):
        return Exit.FAILED, f"out of memory: {error}" if str(error) else "out of memory"
    return Exit.BUG, f"{type(error).__name__}: {error}"


def _os_error(error: OSError) -> str:
    """What the system said and about which file, without the bare errno if there is a text."""
    if error.strerror is None:
        return str(error)
    said = reason_of(error)
    names = [str(name) for name in (error.filename, error.filename2) if name is not None]
    return f"{', '.join(names)}: {said}" if names else said


def _missing(error: ImportError) -> tuple[Exit, str]:
    module = (error.name or "").partition(".")[0]
    if module in EXTRAS:
        return Exit.MISSING, f"{module} is not installed: {extra(EXTRAS[module])}"
    if module in _CORE:
        return (
            Exit.MISSING,
            f"{module}, which inanet needs, cannot be imported ({error}): "
            f"{pip_install('--force-reinstall inanet')}",
        )
    return Exit.BUG, f"{type(error).__name__}: {error}"
