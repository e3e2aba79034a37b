"""Layouts put on devices. Reading order: `process` (device, seeds, threads, memory, the environment)."""
