"""XAgg's aggregator as an XDP program: Algorithm 1 in the kernel, on the slots and tables of a node in user space.

``layout.h`` is the source of all layouts that both sides share, ``aggregator.bpf.c`` the program, ``aggregator.bpf.o``
what ``python -m inanet.xdp.build`` made of it. These three may be used under GPL-2.0-only or BSD-2-Clause, as the
kernel asks of programs that call its functions; everything else here is Apache-2.0 like the rest of the package.
"""
