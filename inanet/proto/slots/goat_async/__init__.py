"""GOAT's asynchronous training (section V) on the switches, at the PS and at the workers: epochs of K_t gradients.

A node sends a slot's sum on when as many workers are in it as were published for the epoch (K_t^s), whoever they are; the
PS closes an epoch when all that K_t workers have sent has come. What is late stays where it is and counts in a later epoch.

Every packet is acknowledged by whoever keeps what is in it: a contribution by the node that has it in a slot, or by the PS;
a sum by the PS, and its slot is free from then on. So a worker can send a gradient that is larger than its window, and is
not kept waiting for others while it does. What comes for a slot whose sum is on its way is passed on as it is.
"""
