"""The subject: mixture of experts. Reading order: `layer` (one screen), `router`, `balance`, `dispatch`, `experts`."""
