"""GOAT's controller: which switch aggregates which sub-model, and where every worker sends its part.

The paper is "Accelerating Distributed Training With Collaborative In-Network Aggregation" (IEEE/ACM ToN 2024). The
problem, GINA (its Eq. (1), with ``y <= x``), is in :mod:`.relaxation`; its algorithm, KRGS, in :mod:`.rounding` and
:mod:`.krgs`; the schedulers it is compared with in :mod:`.sharing`; what running jobs are published, and when it is
made anew, in :mod:`.publishing` and :mod:`.fabric`; asynchronous training in :mod:`.asynchronous` (Algorithm 2) and
:mod:`.epochs` (the PS).

Everything here is pure: graphs, numbers and seeds in, schedules out. scipy and networkx come with the ``plan`` extra
and are imported where they are used.
"""
