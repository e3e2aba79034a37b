"""Damaged files of every kind that Penstock reads: `damage` makes them, `readers` reads them, `harness` judges."""
