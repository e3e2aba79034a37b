"""How ranks begin: the environment they find, the machine around them, where they meet, who starts them.

Reading order: `variables` (what is set), `environment` (what is read), `host` (cores near a GPU), `process` (device,
threads, seeds), `meeting` (ranks find each other and agree), `local` (starts ranks here), `jobs` (scripts that start
them elsewhere).
"""
