"""XAgg: nodes that aggregate in trees."""
