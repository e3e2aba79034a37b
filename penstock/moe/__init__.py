"""Mixture of experts: the router, the transfer of tokens to experts and back, and the experts' networks.

Reading order: `layer` (one screen), `routing`, `router`, `balance`, `dispatch`, `experts`.
"""
