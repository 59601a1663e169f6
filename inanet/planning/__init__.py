"""From a network to a plan: trees, prices, rates."""
