"""For tests of the fabric and of programs on top of it: virtual time, an in-memory network, whole fabrics in a process.

- :class:`FakeClock`: seconds that pass when somebody says so.
- :class:`inanet.phy.memory.MemoryNetwork`: devices without a kernel, deterministic and in order.
- :class:`VirtualFabric`: real machines on that network, pumped until a condition holds; kills and restarts nodes.
"""

from inanet.phy.memory import MemoryDevice as MemoryDevice
from inanet.phy.memory import MemoryNetwork as MemoryNetwork
from inanet.testing.clock import FakeClock as FakeClock
from inanet.testing.fabric import VirtualFabric as VirtualFabric
from inanet.testing.pump import Stuck as Stuck
