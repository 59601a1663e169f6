"""Metrics of a test, served by a loop in a thread."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from inanet.service.addresses import Resolved
from inanet.service.http import HttpServer
from inanet.service.metrics import Scrape, serve_metrics

PATIENCE = 20.0


@contextmanager
def serving(scrape: Scrape, port: int = 0) -> Iterator[HttpServer]:
    """Serve while the block lasts."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        opening = serve_metrics(Resolved("127.0.0.1", port, "here"), scrape)
        server = asyncio.run_coroutine_threadsafe(opening, loop).result(PATIENCE)
        try:
            yield server
        finally:
            loop.call_soon_threadsafe(server.close)
    finally:
        # what was closed is gone a turn later
        asyncio.run_coroutine_threadsafe(asyncio.sleep(0), loop).result(PATIENCE)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
