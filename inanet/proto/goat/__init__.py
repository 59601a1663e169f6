"""GOAT's data plane: sub-models with memory of their own on one switch each, and a PS that sums the switches' sums.

Which switch has which sub-model, and which of them every worker sends to, is the controller's business
(:mod:`inanet.control.goat`); it comes with a tensor's layout (:class:`~inanet.proto.plan.Scheduled`).

- :mod:`~inanet.proto.goat.frames`: packets in batches: checks, tags, checksums;
- :mod:`~inanet.proto.goat.policy`, :mod:`~inanet.proto.goat.program`: a switch;
- :mod:`~inanet.proto.goat.worker`: a worker;
- :mod:`~inanet.proto.goat.ps`: the PS.
"""
