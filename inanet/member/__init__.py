"""A node's side of the control plane."""
