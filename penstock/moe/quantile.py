"""Quantile balancing: the bias with which each expert would have had its even share of the step's tokens.

A token takes the K experts with the highest choice scores. Its margin for an expert is the expert's choice score minus
that of the K-th best other expert: above 0 for those that it takes. If an expert's bias alone were lower by c, the
tokens with a margin above c would take it. So each bias is lowered by the c that as many margins exceed as the even
share, K / E of the tokens (after kexue.fm/archives/11619, "quantile balancing", and Kimi K3). There is no rate: an
expert without tokens gets its share in a few steps, however far its scores are behind.

With K = 1, an even share of one token and margins 0.3, -0.1, -0.2 of an expert, c is between 0.3 and -0.1.

A quantile of all tokens is no sum over micro-batches and ranks, but counts of margins in bins are: all layouts get one
bias. Bins are fine near 0, where balance ends, and grow with the distance: BINS_IN_OCTAVE for each power of two from
2**LOWEST to 2**HIGHEST on both sides. Inside a bin the counts are taken as evenly spread.
"""

import torch
from torch import Tensor

from penstock.kernels.reference import RouterRule, choice_scores

LOWEST, HIGHEST = -16, 4  # margins beyond count in the outermost bins
BINS_IN_OCTAVE = 4
SIDE = (HIGHEST - LOWEST) * BINS_IN_OCTAVE
BINS = 2 * SIDE


@torch.no_grad()
def margin_counts(logits_TE: Tensor, bias_E: Tensor, rule: RouterRule) -> Tensor:
    """How many tokens have a margin in each bin: int64, E x BINS, the lowest first. The host waits for nothing."""
    choice_TE = choice_scores(logits_TE.float(), bias_E, rule)
    last_T1, next_T1 = choice_TE.topk(rule.top_k + 1, dim=-1).values[:, -2:].split(1, dim=1)  # taken, and not taken
    margin_TE = choice_TE - torch.where(choice_TE >= last_T1, next_T1, last_T1)
    octave_TE = margin_TE.abs().log2().clamp(LOWEST, HIGHEST) - LOWEST  # of a margin of 0: the lowest
    bin_TE = (octave_TE * BINS_IN_OCTAVE).long().clamp(max=SIDE - 1)
    bin_TE = torch.where(margin_TE > 0, SIDE + bin_TE, SIDE - 1 - bin_TE)
    bin_TE += torch.arange(margin_TE.shape[1], device=bin_TE.device) * BINS
    counts = torch.zeros(margin_TE.shape[1] * BINS, dtype=torch.int64, device=bin_TE.device)
    return counts.scatter_add_(0, bin_TE.flatten(), torch.ones_like(bin_TE).flatten()).view(-1, BINS)


def quantile_shift(margins_EU: Tensor, top_k: int) -> Tensor:
    """By how much each expert's bias is too high, float32; 0 if no token was counted."""
    share = margins_EU.sum(1, keepdim=True).double() * top_k / len(margins_EU)
    above_EU = margins_EU.flip(1).cumsum(1).flip(1).double()  # margins in a bin and in those above it
    bin_E1 = (above_EU >= share).sum(1, keepdim=True).clamp(min=1) - 1  # the highest with enough of them
    here_E1 = margins_EU.gather(1, bin_E1).double()
    missing_E1 = share - (above_EU.gather(1, bin_E1) - here_E1)  # of the even share, above the bin
    edge_U = _edges(margins_EU.device)
    low_E1, high_E1 = edge_U[bin_E1], edge_U[bin_E1 + 1]
    shift_E1 = high_E1 - (high_E1 - low_E1) * (missing_E1 / here_E1.clamp(min=1)).clamp(0, 1)
    return torch.where(share > 0, shift_E1, 0.0)[:, 0].float()


def _edges(device: torch.device) -> Tensor:
    """Where bins begin, and where the last ends."""
    steps = torch.arange(1, SIDE + 1, dtype=torch.float64, device=device)
    above = torch.exp2(steps / BINS_IN_OCTAVE + LOWEST)
    return torch.cat((-above.flip(0), above.new_zeros(1), above))
