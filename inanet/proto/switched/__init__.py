"""What the systems whose slots are a switch's registers have in common.

The four stages of :mod:`inanet.proto.engine` on a switch: the packet itself is what is emitted, so a program turns every
packet into a verdict (:mod:`inanet.proto.program`) instead of keeping logs. Bottom up:

- :mod:`~inanet.proto.switched.registers`, :mod:`~inanet.proto.switched.tenants`: the slots, and who may use which;
- :mod:`~inanet.proto.switched.program`: what every program does beside its policy (jobs, ageing, figures);
- :mod:`~inanet.proto.switched.source`, :mod:`~inanet.proto.switched.stream`, :mod:`~inanet.proto.switched.exponents`: a
  worker's tensor as a stream of numbered fragments, and the exponents, which go to the root directly;
- :mod:`~inanet.proto.switched.window`: what is in flight, what is lost;
- :mod:`~inanet.proto.switched.worker`: the worker's machine, which systems give a framing and a pace;
- :mod:`~inanet.proto.switched.leaves`: the sums of a PS behind switches that pass incomplete ones on (leaf bitmaps).
"""
