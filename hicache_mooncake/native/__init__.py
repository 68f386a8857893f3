"""Compiled copying of batches: optional, see ``library``."""
