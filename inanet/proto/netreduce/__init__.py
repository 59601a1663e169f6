"""NetReduce: aggregation in the middle of RoCEv2 connections, which do not notice.

Workers form a ring; each has a queue pair (:mod:`inanet.proto.roce`) to its successor. A switch holds the packets of all
ranks for one place of one message, adds them, and sends each packet on under its own headers with the sum in it: what a
worker receives from its predecessor is the result. Bottom up:

- :mod:`~inanet.proto.netreduce.connections`: the connection lookup table, which finds a packet's place;
- :mod:`~inanet.proto.netreduce.memory`: the aggregator array of a ring;
- :mod:`~inanet.proto.netreduce.headers`: packets that leave, under original, translated or regenerated headers;
- :mod:`~inanet.proto.netreduce.policy`: resolve, admit, fold, emit, over a batch;
- :mod:`~inanet.proto.netreduce.plan`, :mod:`~inanet.proto.netreduce.program`: what a switch is told, and the program;
- :mod:`~inanet.proto.netreduce.tensors`: a tensor as messages, and back;
- :mod:`~inanet.proto.netreduce.flow`: the message window between tensors and a queue pair;
- :mod:`~inanet.proto.netreduce.plain`: ring all-reduce on the same queue pairs where no switch aggregates;
- :mod:`~inanet.proto.netreduce.worker`: a worker's machine;
- :mod:`~inanet.proto.netreduce.parallel`: a host with several ranks and a ring for each, and the patterns beside that.
"""
