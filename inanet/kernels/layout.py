"""Where a row keeps its payload: the one thing kernels know about packets.

The figures repeat :mod:`inanet.wire.xagg` on purpose (kernels know nobody); a test holds the two together.
"""

import numpy as np

#: 32-bit words of a row before the payload
HEADER_WORDS = 6
#: 32-bit payload words of a row
PAYLOAD_WORDS = 256
#: index of the checksum word, the one after the payload
CHECKSUM_WORD = HEADER_WORDS + PAYLOAD_WORDS
#: words of a row, and the stride of slots
ROW_WORDS = CHECKSUM_WORD + 1

# The same for inner loops. Compiled code wraps negative indices of signed type and counts the references of
# every slice it takes; indexing rows directly with unsigned numbers does neither, and small loops are up to
# twice as fast.
HEAD = np.uint64(HEADER_WORDS)
WORDS = np.uint64(PAYLOAD_WORDS)
CHECK = np.uint64(CHECKSUM_WORD)

#: elements of a fragment of floats, and those that share one exponent where none is agreed on for this round alone
BLOCK = 256
#: elements that share one exponent where those are agreed on for every round (prologue)
PROLOGUE_BLOCK = 8
#: block exponents, one byte each, that one fragment carries (prologue)
EXPONENTS_PER_FRAGMENT = PAYLOAD_WORDS * 4
#: block exponent that stands for NaN or infinity
POISON = 255
