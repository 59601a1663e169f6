"""Where a row keeps its payload: the one thing kernels know about packets.

The figures repeat :mod:`inanet.wire.xagg` on purpose (kernels know nobody); a test holds the two together.
"""

#: 32-bit words of a row before the payload
HEADER_WORDS = 6
#: 32-bit payload words of a row
PAYLOAD_WORDS = 256
#: index of the checksum word, the one after the payload
CHECKSUM_WORD = HEADER_WORDS + PAYLOAD_WORDS
#: words of a row, and the stride of slots
ROW_WORDS = CHECKSUM_WORD + 1

#: tensor elements that share one exponent (R2); one fragment of a floating-point sum
BLOCK = 256
#: block exponents, one byte each, that one fragment carries (R1, prologue)
EXPONENTS_PER_FRAGMENT = PAYLOAD_WORDS * 4
#: block exponent that stands for NaN or infinity
POISON = 255
