"""What all protocol machines share: their contract, events, plans and number formats."""
