"""GOAT's data plane: sub-models with memory of their own on one switch each, and a PS that sums the switches' sums.

Which switch has which sub-model, and which of them every worker sends to, is the controller's business
(:mod:`inanet.planning.goat`); it comes with a tensor's layout (:class:`~inanet.proto.common.plan.Scheduled`).

- :mod:`~inanet.proto.slots.goat.frames`: packets in batches: checks, tags, checksums;
- :mod:`~inanet.proto.slots.goat.policy`, :mod:`~inanet.proto.slots.goat.program`: a switch;
- :mod:`~inanet.proto.slots.goat.worker`: a worker;
- :mod:`~inanet.proto.slots.goat.ps`: the PS.
"""
