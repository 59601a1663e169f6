"""All figures and tables that can be run, one list a paper: their names, scales and what runs them."""
