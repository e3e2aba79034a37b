"""Other people's trainers beside ours on one machine: the same model, rows, text and optimizer.

`python -m benchmarks.peers` installs and runs them. The trainer of TorchTitan imports `titan_0_2` or `titan_0_3` by
the hooks that it offers for models and datasets of its users; nothing of the peer is changed.
"""
