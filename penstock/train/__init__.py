"""A run while it trains: steps, loss, optimizer, schedule, checkpoints, metrics, evaluation."""
