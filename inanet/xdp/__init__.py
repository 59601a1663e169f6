"""XAgg's aggregator as an XDP program, Algorithm 1 in the kernel on the slots and tables of a node in user space; and a
program that puts a worker's results where the worker reads them without a system call.

``layout.h`` is the source of all layouts that both sides share, ``aggregator.bpf.c`` and ``worker.bpf.c`` are the programs,
``aggregator.bpf.o`` and ``worker.bpf.o`` what ``python -m inanet.xdp.build`` made of them. These, and the other headers, may
be used under GPL-2.0-only or BSD-2-Clause, as the kernel asks of programs that call its functions; everything else here is
Apache-2.0 like the rest of the package.
"""
