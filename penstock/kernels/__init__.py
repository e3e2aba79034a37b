"""Operators: tensors in, tensors out. No modules, no process groups, no configuration.

Reading order: `reference` (the eager truth of every operator), then the fast form of each beside it.
"""
