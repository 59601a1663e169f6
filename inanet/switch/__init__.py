"""The emulated programmable switch: ports, a pipeline of named stages, a register file, egress queues.

Programs (:mod:`inanet.proto.common.program`) are the switch sides of the systems. Everything here but the ports is sans-IO:
``now`` is an argument, in seconds.
"""
