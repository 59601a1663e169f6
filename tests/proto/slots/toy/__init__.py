"""A system that takes nothing but this package and one record in the table of systems."""
