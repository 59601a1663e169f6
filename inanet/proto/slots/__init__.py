"""Systems whose slots are a switch's registers."""
