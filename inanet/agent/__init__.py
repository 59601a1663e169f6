"""The agent of a host: local ranks and their collectives."""
