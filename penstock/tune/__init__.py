"""Measuring on the machine that will train, so that it can choose: `kernels` and the `cases` that it times."""
