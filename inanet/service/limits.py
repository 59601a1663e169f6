"""Limits of this process as the reason for an error of the system, in words that say which and how much."""

import errno
import resource

from inanet.units import show_bytes, show_count


def reason_of(error: OSError) -> str:
    """What the system said, with the limit that was reached, where there is one, and what raises it."""
    said = error.strerror or str(error)
    if error.errno == errno.EMFILE:
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        return f"{said}: this process may have {show_count(most, 'descriptor')} (ulimit -n; LimitNOFILE= of a unit)"
    if error.errno == errno.ENFILE:
        return f"{said}: on this host, see fs.file-max"
    if error.errno == errno.EFBIG:
        most = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
        if most != resource.RLIM_INFINITY:
            return f"{said}: this process may make files of {show_bytes(most)} (ulimit -f; LimitFSIZE= of a unit)"
    if error.errno == errno.ENOMEM:
        for limit, name in (
            (resource.RLIMIT_MEMLOCK, "-l; LimitMEMLOCK="),
            (resource.RLIMIT_AS, "-v; LimitAS="),
        ):
            most = resource.getrlimit(limit)[0]
            if most != resource.RLIM_INFINITY:
                said += f"; limited to {show_bytes(most)} (ulimit {name} of a unit)"
    return said
