"""Transports: how a request gets to a worker and its reply back. One file each; ``base.py`` is their interface."""
