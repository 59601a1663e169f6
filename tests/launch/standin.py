"""A stand-in for a daemon: binds what one would bind, says it is ready, counts, ends on SIGTERM. A script.

``standin.py CONFIG [BEHAVIOUR]``: ``mute`` never becomes ready, ``broken`` fails at once, ``deaf`` ignores
SIGTERM, ``compiling`` says that it compiles kernels and never becomes ready.
"""

import ctypes
import json
import os
import signal
import socket
import sys
import tomllib

PR_GET_PDEATHSIG = 2


def main() -> None:
    with open(sys.argv[1], "rb") as file:
        config = tomllib.load(file)
    behaviour = sys.argv[2] if len(sys.argv) > 2 else ""
    if behaviour == "broken":
        sys.exit("no such thing as luck")
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    death = ctypes.c_int()
    ctypes.CDLL(None).prctl(PR_GET_PDEATHSIG, ctypes.byref(death), 0, 0, 0)
    print(f"{config['node']['name']} dies with signal {death.value}", file=sys.stderr, flush=True)
    sockets = []
    for path in (config["control"].get("listen"), "unix:" + config.get("local", {}).get("socket", "")):
        if path and path != "unix:":
            path = path.removeprefix("unix:")
            if os.path.exists(path):
                os.unlink(path)
            sockets.append(socket.socket(socket.AF_UNIX))
            sockets[-1].bind(path)
    if behaviour == "compiling":
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notify:
            notify.connect(os.environ["NOTIFY_SOCKET"])
            notify.send(b"STATUS=compiling kernel 1\nEXTEND_TIMEOUT_USEC=180000000")
    elif behaviour != "mute":
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notify:
            notify.connect(os.environ["NOTIFY_SOCKET"])
            notify.send(b"STATUS=warming up")
            notify.send(b"READY=1\nSTATUS=serving")
    if behaviour == "deaf":
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
        signal.sigwait([signal.SIGUSR1])
    signal.sigwait([signal.SIGTERM])
    with open(os.environ["INA_STATS_FILE"], "w") as file:
        json.dump(
            {"rx_bytes": 7, "leaf_contributions": 2, "drops": {"injected": 1, "short": 0}, "new_key": 5}, file
        )


main()
