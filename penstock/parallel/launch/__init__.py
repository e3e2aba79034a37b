"""How ranks start: environment variables, CPU cores, rendezvous, and the launchers.

Reading order: `environment` (variables that are set and read, cores near a GPU), `process` (device, threads,
seeds), `rendezvous` (ranks find each other and agree), `local` (starts ranks here), `jobs` (scripts for clusters).
"""
