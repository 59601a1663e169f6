"""Sizes of NetReduce's messages as in the paper's experiments (section 5.1).

They stand apart from the header because configuration files have them as defaults, and reading one imports no arrays.
"""

#: bytes of a packet's payload, the path MTU of the paper's queue pairs
PACKET_BYTES = 1024
#: packets in a message
MESSAGE_PACKETS = 170
#: messages in flight
WINDOW = 2
