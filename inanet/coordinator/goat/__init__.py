"""What only GOAT's jobs have at the coordinator: schedules, and rounds of asynchronous training."""
