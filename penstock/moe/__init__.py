"""The subject: mixture of experts.

Reading order: `layer` (one screen), `routing`, `router`, `balance`, `dispatch`, `experts`.
"""
