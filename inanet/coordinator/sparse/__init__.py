"""What only sparse jobs have at the coordinator: hot keys, and a model that servers keep."""
