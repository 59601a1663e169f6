"""Compiled loops over fragments: the only code that touches a tensor's values one by one.

A *row* is one fragment as it lies in a slot and on the wire: :data:`~inanet.kernels.layout.ROW_WORDS`
little-endian 32-bit words. Kernels know that shape and nothing else about packets. They take preallocated
arrays, allocate nothing, raise nothing and release the interpreter lock, so that one call handles a whole
super-frame.
"""
