"""A discrete-event network in virtual time that drives the machines and programs that real daemons run.

Hosts hold sans-IO machines, switches forward and may run a program, links have a rate, a delay, a queue, an ECN threshold
and losses from a seed. There is no clock, no socket and no chance that is not seeded: the same network gives the same
run, event for event.

**Scale.** Packets stay together as they were sent, at most ``grain`` of them (:class:`~.link.LinkSpec`): such a piece is
queued, marked and lost packet by packet, but arrives as one when its last packet does. A hop therefore adds up to
``grain - 1`` packet times of delay, and nothing to throughput; ``grain=1`` is exact. Python runs once per piece and hop:
some 20,000 of them per second, so that a round of 1 MB from 4 workers takes a fraction of a second and 100 MB belong to
the arithmetic instead. Hosts compute in no time: what a machine takes of a processor is not simulated.

**Ticks.** With ``Network(tick=...)`` everything happens at multiples of a tick, as with hosts that poll: what arrives around
one of them is one batch, and a machine costs Python once per tick, whatever the rate. Several ticks make a round trip, and
a round trip of ten hosts takes some 10 ms.

:class:`~.rack.Rack` has jobs around one switch, :class:`~.cluster.Cluster` jobs on servers that they share, in racks under
core switches.
"""
