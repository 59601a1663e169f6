"""What processes say to each other: control messages, and the session of a training process and its agent."""
