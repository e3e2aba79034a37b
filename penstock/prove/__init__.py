"""Random compositions of models, layouts and options, each trained beside one process, for `penstock prove`.

Reading order: `play` (a few steps on one rank, and what they gave), `choices` (of routers: recorded, compared, given),
`ranks` (processes that stay), `draws` (random settings), `proof` (equal, a tie, refused or a fault; the smallest case).
"""
