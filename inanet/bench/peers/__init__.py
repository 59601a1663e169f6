"""What inanet is compared with: one module per peer, all driven the same way.

A peer's rank is a process that answers every line ``{"bytes": N}`` on its standard input with
``{"seconds": s, "cpu": c}``: one all-reduce of N bytes of float32, from a barrier to the result, and the processor time
that this process used for it. With ``"late": [s, ...]`` rank i has its tensor s[i] seconds later. The parent gives the line to all ranks and counts the slowest.
"""
