"""The routers' auxiliary losses of a layer in one kernel of one program.

Each step of their definition is an operator on a few hundred numbers, and there are some twenty; on a GPU a kernel
takes some microseconds however little it does, and tokens wait for them at every layer.
"""

from torch import Tensor

from penstock.kernels.language import tl, triton
from penstock.kernels.launching import start_kernel
from penstock.kernels.operators import LinearLoss


def balance_loss(mass_BE: Tensor, z_B: Tensor, slots_BE: Tensor, factor: float, z_factor: float) -> LinearLoss:
    """`penstock.kernels.operators.reference_balance_loss` in one kernel; sums in another order.

    Args:
        mass_BE: float32, contiguous.
        z_B: float32.
        slots_BE: int64; of each sequence, or 1 x E for all.
        factor: of the first loss.
        z_factor: of the second.

    Returns:
        As there.
    """
    sequences, experts = mass_BE.shape
    found = LinearLoss(mass_BE.new_empty(()), mass_BE.new_empty(sequences, experts), z_B.new_empty(sequences))
    start_kernel(
        balance_loss_kernel,
        (1,),
        mass_BE.contiguous(),
        z_B.contiguous(),
        slots_BE.contiguous(),
        *found,
        sequences,
        0 if len(slots_BE) == 1 else experts,
        experts,
        factor,
        z_factor,
        BLOCK_E=triton.next_power_of_2(experts),
        num_warps=1,
    )
    return found


@triton.jit(do_not_specialize=["sequences", "slots_stride", "factor", "z_factor"])
def balance_loss_kernel(
    mass_ptr,
    z_ptr,
    slots_ptr,
    loss_ptr,
    dmass_ptr,
    dz_ptr,
    sequences,
    slots_stride,
    experts,
    factor,
    z_factor,
    BLOCK_E: tl.constexpr,
):
    """All sequences, one after the other. Example with 2 experts, a factor of 1 and slots [3, 1]: dmass [1.5, 0.5]."""
    expert_E = tl.arange(0, BLOCK_E)
    is_expert = expert_E < experts
    loss_E = tl.zeros([BLOCK_E], tl.float32)
    z_sum = 0.0
    for sequence in range(sequences):
        slots_E = tl.load(slots_ptr + sequence * slots_stride + expert_E, mask=is_expert, other=0).to(tl.float32)
        even = experts / tl.maximum(tl.sum(slots_E, 0), 1.0)
        dmass_E = slots_E * (even * factor)
        place_E = sequence * experts + expert_E
        loss_E += dmass_E * tl.load(mass_ptr + place_E, mask=is_expert, other=0.0)
        tl.store(dmass_ptr + place_E, dmass_E, mask=is_expert)
        z_sum += tl.load(z_ptr + sequence)
        tl.store(dz_ptr + sequence, z_factor)
    tl.store(loss_ptr, tl.sum(loss_E, 0) + z_sum * z_factor)
