"""Kills and faults at random moments: a run that goes on after them equals one that had none, bit for bit."""
