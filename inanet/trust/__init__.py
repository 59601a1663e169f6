"""Certificates: who may be what, who issues them, which are revoked."""
