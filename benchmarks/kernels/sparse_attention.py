"""Sparse attention with the sizes of DeepSeek-V3.2 in bfloat16: its kernels, and a whole layer beside dense attention.

    python -m benchmarks.kernels.sparse_attention --output sparse-attention.json

TFLOP/s count products of pairs of a query and a key that it chose, whatever is computed again: forward scores and
values, backward scores, dP, dV, dQ and dK. Chosen keys are drawn: equally many are at every distance. The layer has
random weights and hidden states, and its own indexer chooses. Dense attention is the same layer without indexer, with
the backend that `kernels.attention=auto` takes; masks are the definition. Layers take turns; times are medians of all
rounds.
"""

import argparse
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from benchmarks import record
from penstock.config.load import load_run
from penstock.config.model import LatentAttention
from penstock.kernels.sparse_attention import IndexLoss
from penstock.kernels.sparse_attention_launches import choose_keys, sparse_attention
from penstock.kernels.triton_operators import TRITON
from penstock.models.mla import LatentLayer
from penstock.models.model_inputs import ForwardContext
from penstock.models.rope import angles
from penstock.moe.routing import Scope
from penstock.parallel.layer_context import LayerContext

MODEL = load_run("deepseek-v3.2").model


def main() -> None:
    options = parse_arguments()
    torch.manual_seed(0)
    numbers = {
        "kernels": print_kernels(options.positions, options.rounds),
        "layer": print_layers(options.layer_positions, options.rounds, ("sparse", "dense")),
        "short_layer": print_layers(options.short_positions, options.rounds, ("sparse", "dense", "masks")),
    }
    record.write(options, numbers)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="timed passes of each candidate")
    parser.add_argument("--positions", type=int, default=32768, help="of the kernels' row")
    parser.add_argument("--layer-positions", type=int, default=65536, help="of the layers' row")
    parser.add_argument("--short-positions", type=int, default=4096, help="of a row whose squares fit, for the masks")
    record.add_arguments(parser)
    return parser.parse_args()


def attention_config() -> LatentAttention:
    assert isinstance(MODEL.attention, LatentAttention) and MODEL.attention.indexer is not None
    return MODEL.attention


def normal(*size: int) -> Tensor:
    return torch.randn(*size, device="cuda", dtype=torch.bfloat16)


def median_ms(call: Callable[[], object], rounds: int) -> float:
    """Milliseconds by events on the stream, after two calls that are not timed."""
    times = []
    for _ in range(rounds + 2):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop))
    return statistics.median(times[2:])


def drawn_keys(positions: int, top_k: int) -> Tensor:
    """Random keys before each query, or all of them if they are fewer."""
    keys_BSK = torch.full((1, positions, top_k), -1, dtype=torch.int32, device="cuda")
    key_S = torch.arange(positions, device="cuda")
    for first in range(0, positions, 1024):
        own = key_S[first : first + 1024, None]
        scores_QS = torch.rand(len(own), positions, device="cuda").masked_fill(key_S > own, -1)
        best = scores_QS.topk(top_k)
        keys_BSK[0, first : first + 1024] = best.indices.masked_fill(best.values < 0, -1)
    return keys_BSK


def print_kernels(positions: int, rounds: int) -> dict[str, float]:
    config = attention_config()
    indexer, heads, latent = config.indexer, config.heads, config.kv_lora_rank
    assert indexer is not None
    keys_BSK = drawn_keys(positions, indexer.index_topk)
    first_BS = torch.zeros(1, positions, dtype=torch.int32, device="cuda")
    rotary, pairs = config.qk_rope_head_dim, int((keys_BSK >= 0).sum())
    of_index = normal(1, positions, indexer.index_n_heads, indexer.index_head_dim), normal(1, positions, 128)
    weights_BSG = torch.rand(1, positions, indexer.index_n_heads, device="cuda") / 64
    found = {"choice_ms": median_ms(lambda: choose_keys(*of_index, weights_BSG, first_BS, indexer.index_topk), rounds)}
    inputs = [
        0.1 * normal(heads, 1, positions, latent),
        0.1 * normal(1, positions, heads, rotary),
        normal(1, positions, latent),
        normal(1, positions, rotary),
    ]
    leaves = [one.requires_grad_() for one in inputs]
    attend = partial(sparse_attention, *leaves, keys_BSK, first_BS, scale=0.1)
    with torch.no_grad():
        found["forward_ms"] = median_ms(attend, rounds)
    o_HBSC = attend()
    do_HBSC = torch.randn_like(o_HBSC)
    found["backward_ms"] = median_ms(lambda: torch.autograd.grad(o_HBSC, leaves, do_HBSC, retain_graph=True), rounds)
    index = IndexLoss(*(one.requires_grad_() for one in of_index), weights_BSG.requires_grad_(), 1 / positions)
    o_HBSC = attend(index=index)
    all_leaves = [*leaves, *index[:3]]
    found["backward_with_loss_ms"] = median_ms(
        lambda: torch.autograd.grad(o_HBSC, all_leaves, do_HBSC, retain_graph=True), rounds
    )
    key_width = latent + rotary
    found["forward_tflops"] = 2 * pairs * heads * (key_width + latent) / found["forward_ms"] / 1e9
    found["backward_tflops"] = 2 * pairs * heads * (3 * key_width + 2 * latent) / found["backward_ms"] / 1e9
    print(f"{positions} positions: " + ", ".join(f"{name} {value:.1f}" for name, value in found.items()), flush=True)
    return found


def print_layers(positions: int, rounds: int, names: Sequence[str]) -> dict[str, float]:
    """Milliseconds of both passes of the layers, and what a pass allocates at its peak."""
    config = attention_config()
    x_BSD = normal(1, positions, MODEL.hidden_size).requires_grad_()
    cos_BSP, sin_BSP = angles(config.rope, config.rotary_dim, torch.arange(positions, device="cuda")[None])
    first_BS = torch.zeros(1, positions, dtype=torch.int32, device="cuda")
    context = ForwardContext(cos_BSP, sin_BSP, None, Scope(sequences=1, share=1.0), first_BS=first_BS)
    plain = config.model_copy(update={"indexer": None})
    masks = replace(TRITON, choose_keys=None, sparse_attention=None)
    kinds = {"sparse": (config, TRITON), "dense": (plain, TRITON), "masks": (config, masks)}
    found: dict[str, float] = {}
    steps = {}
    for name in names:
        with torch.device("meta"):
            layer = LatentLayer(kinds[name][0], MODEL.hidden_size, replace(LayerContext(), operators=kinds[name][1]))
        layer.to_empty(device="cuda").to(torch.bfloat16)
        for parameter in layer.parameters():
            torch.nn.init.normal_(parameter, std=0.02) if parameter.ndim > 1 else torch.nn.init.ones_(parameter)
        steps[name] = partial(step, layer, x_BSD, context)
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in steps}
    for turn in range(rounds + 2):
        for name, run in steps.items():
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            pair = run()
            found[f"{name}_peak_bytes"] = torch.cuda.max_memory_allocated() - before
            if turn >= 2:
                times[name].append(pair)
    for name, pairs in times.items():
        found[f"{name}_forward_ms"] = statistics.median(pair[0] for pair in pairs)
        found[f"{name}_backward_ms"] = statistics.median(pair[1] for pair in pairs)
    whole = {name: found[f"{name}_forward_ms"] + found[f"{name}_backward_ms"] for name in steps}
    for name in names[1:]:
        found[f"sparse_over_{name}"] = whole[name] / whole["sparse"]
    print(f"{positions} positions, a layer: " + ", ".join(f"{name} {value:.4g}" for name, value in found.items()))
    return found


def step(layer: LatentLayer, x_BSD: Tensor, context: ForwardContext) -> tuple[float, float]:
    """Milliseconds of forward and of backward."""
    start, middle, stop = (torch.cuda.Event(enable_timing=True) for _ in range(3))
    start.record()
    y_BSD = layer(x_BSD, context)
    middle.record()
    y_BSD.backward(x_BSD.detach())
    stop.record()
    stop.synchronize()
    x_BSD.grad = None
    layer.zero_grad(set_to_none=True)
    return start.elapsed_time(middle), middle.elapsed_time(stop)


if __name__ == "__main__":
    main()
