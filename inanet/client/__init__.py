"""What a training process imports. It knows the worker agent's socket and nothing of the network."""
