"""Operators: tensors in, tensors out. No modules, no process groups, no configuration.

Reading order: `reference` (the eager definition of every operator), then the kernel of each beside it.
"""
