"""Measuring on the machine that will train, so that it can choose.

Reading order: `cases` and `kernels` (every implementation of every operator), `trial` (a configuration, in processes of
its own), `rungs` and `ladder` (one optimization after another), `ladder_file` and `evidence` (what is written down).
"""
