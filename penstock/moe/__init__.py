"""Mixture of experts: the router, the transfer of tokens to experts and back, and the experts' networks.

Reading order: `layer` (one screen), `router`, `balance`, `dispatch`, `experts`.
"""
