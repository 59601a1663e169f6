"""NetReduce: aggregation in the middle of RoCEv2 connections, which do not notice.

Workers form a ring; each has a queue pair (:mod:`inanet.proto.roce`) to its successor. A switch holds the packets of all
ranks for one place of one message, adds them, and sends each packet on under its own headers with the sum in it: what a
worker receives from its predecessor is the result. Bottom up:

- :mod:`~inanet.proto.netreduce.tables`: the connection lookup table, which finds a packet's place, and the aggregator array;
- :mod:`~inanet.proto.netreduce.policy`: resolve, admit, fold, emit, over a batch, and the headers of what leaves;
- :mod:`~inanet.proto.netreduce.ring`, :mod:`~inanet.proto.netreduce.program`: what a switch is told, and the program;
- :mod:`~inanet.proto.netreduce.worker`: messages on a queue pair, in a window or as a plain ring;
- :mod:`~inanet.proto.netreduce.worker`: a tensor as messages and back, a worker's machine;
- :mod:`~inanet.proto.netreduce.parallel`: a host with several ranks and a ring for each, and the patterns beside that;
- :mod:`~inanet.proto.netreduce.tunnel`: all of it in datagrams, for jobs of a coordinator.
"""
