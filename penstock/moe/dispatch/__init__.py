"""Tokens to their experts and back, behind one contract: `contract` says it, every other file keeps it."""
