"""The one legend of dimension letters. A tensor's name ends in the letters of its shape: `x_TD` is tokens x hidden.

A letter never changes its meaning between files. A small letter is the part of a dimension that one rank holds.
`dim` is of a tensor, `axis` is of a device mesh.
"""

LEGEND: dict[str, str] = {
    "B": "rows in a micro-batch",
    "S": "positions in a row (sequence length)",
    "T": "tokens in a micro-batch: B x S",
    "D": "hidden size",
    "V": "vocabulary",
    "H": "query heads; value heads of linear attention",
    "G": "key/value heads; query/key heads of linear attention",
    "N": "query/key head dimension",
    "P": "rotary part of a head dimension",
    "M": "value head dimension",
    "C": "rank of a latent projection (MLA)",
    "I": "chunks of a row (linear attention); entries of a row (compressed attention)",
    "J": "positions of a chunk",
    "E": "routed experts of a layer",
    "e": "routed experts that this rank holds",
    "K": "experts per token (top-k)",
    "R": "rows routed to experts: T x K, plus padding",
    "F": "width of a feed-forward network (dense, shared or expert)",
    "Q": "groups of experts",
    "L": "decoder layers",
    "A": "residual streams",
    "W": "ranks of a group",
    "U": "bins of an expert's margins (penstock/moe/balance.py)",
    "X": "replica slots of a rank",
    "Z": "ranks with different experts; with expert tensor parallelism, groups of ranks that share each expert",
}
