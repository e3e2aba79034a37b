"""Penstock pretrains mixture-of-experts language models on PyTorch, from one laptop CPU to thousands of GPUs."""

__version__ = "0.1.0"
