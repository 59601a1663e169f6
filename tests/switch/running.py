"""A switch run by a thread while a test talks to it through the kernel."""

import os
import select
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from inanet.switch.port import Switch

DEADLINE = 10.0


@contextmanager
def running(switch: Switch) -> Iterator[None]:
    """Drive a switch while the block lasts; fails with what the thread failed with."""
    failure: list[BaseException] = []
    done, stop = os.pipe()

    def loop() -> None:
        try:
            while drive(switch, done):
                pass
        except BaseException as error:
            failure.append(error)

    thread = threading.Thread(target=loop)
    thread.start()
    try:
        yield
    finally:
        os.close(stop)
        thread.join()
        os.close(done)
    if failure:
        raise failure[0]


def drive(switch: Switch, done: int) -> bool:
    """One turn of an event loop; False when ``done`` says so."""
    poll = select.poll()
    poll.register(done, select.POLLIN)
    ports = {port.fileno(): port for port in switch.ports}
    for fd, port in ports.items():
        poll.register(fd, select.POLLIN | (select.POLLOUT if port.blocked else 0))
    wait = min(50, max(0, (switch.timer() - time.monotonic()) * 1000))
    for fd, event in poll.poll(wait):
        if fd == done:
            return False
        if event & select.POLLOUT:
            ports[fd].resume()
        if event & select.POLLIN:
            ports[fd].read(time.monotonic())
    if switch.timer() <= time.monotonic():
        switch.on_timer(time.monotonic())
    return True
