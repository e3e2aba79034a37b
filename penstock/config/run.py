"""A run: all fields that decide what `penstock train` does."""

from collections.abc import Mapping
from typing import Literal

from penstock.config.data import Data
from penstock.config.model import Model
from penstock.config.parallel import Dispatch, Elastic, Graphs, Host, Offload, Parallel, Pipeline, Recompute
from penstock.config.schema import Section, knob
from penstock.config.training import Checkpoint, Evaluation, LearningRateSchedule, Optimizer, Profile, Record, Training

RecipeKnob = Literal["none", "auto", "tensorwise", "rowwise", "blockwise", "blockwise-square", "mxfp8"]
OperatorBackend = Literal["auto", "reference", "torch", "triton"]


class Float8(Section):
    """Products in 8 bits; routers, embedding, norms, sums of gradients and the optimizer never are.

    Recipes: docs/float8.md. auto takes mxfp8 on Blackwell and MI355X, blockwise on other chips. Experts of
    blockwise-square read rows that travel as blockwise.
    """

    dense: RecipeKnob = knob("none", doc="Recipe of attention's projections, dense networks and shared experts.")
    experts: RecipeKnob = knob("none", doc="Recipe of the routed experts' products.")
    head: RecipeKnob = knob(
        "none", doc="Recipe of the output projection's products in training; evaluation and samples have 16 bits."
    )
    dispatch: Literal["none", "auto", "blockwise", "mxfp8"] = knob(
        "none",
        doc="In whose blocks rows travel to their experts; outputs and gradients travel in 16 bits.",
    )
    gradients: Literal["e4m3", "e5m2"] = knob("e4m3", doc="Format of the gradients of outputs.")
    first_layers: int = knob(0, doc="Layers at the beginning that stay in 16 bits.", unit="layers", low=0)
    last_layers: int = knob(0, doc="Layers at the end that stay in 16 bits.", unit="layers", low=0)
    gather: bool = knob(
        False, doc="Under `parallel.shard` = full, gather weights in 8 bits where every product that reads them is."
    )

    @property
    def is_used(self) -> bool:
        """Whether anything is computed or sent in 8 bits."""
        return self.is_in_layers or self.head != "none"

    @property
    def is_in_layers(self) -> bool:
        """Whether decoder layers compute or send anything in 8 bits."""
        # `gather` alone changes nothing
        return any(recipe != "none" for recipe in (self.dense, self.experts, self.dispatch))


class Kernels(Section):
    """Implementation of each operator; `penstock kernels list` shows the choices of auto, and why.

    reference is the definition in eager PyTorch, torch is PyTorch's fused operators, triton is our kernels.
    """

    all: OperatorBackend = knob(
        "auto", doc="Value of every other field that is auto; an operator without this implementation takes reference."
    )
    route: Literal["auto", "reference", "triton"] = knob("auto", doc="Router: scores, choice, weights, counts.")
    permute: Literal["auto", "reference", "triton"] = knob(
        "auto", doc="Order of rows by expert, and the sum over a token's rows."
    )
    experts: OperatorBackend = knob(
        "auto", doc="The experts' matrix products: a loop over experts (reference), torch's grouped_mm, or ours."
    )
    experts_forward: OperatorBackend = knob("auto", doc="The forward products only; auto follows `experts`.")
    experts_input_gradient: OperatorBackend = knob(
        "auto", doc="The gradient of the experts' inputs only; auto follows `experts`."
    )
    experts_weight_gradient: OperatorBackend = knob(
        "auto", doc="The gradient of the experts' weights only; auto follows `experts`."
    )
    swiglu: OperatorBackend = knob(
        "auto", doc="SwiGLU of dense networks and shared experts; inside the experts it goes with their products."
    )
    norm: OperatorBackend = knob(
        "auto", doc="RMSNorm, alone and of a residual sum, and other sums of the residual stream."
    )
    rope: Literal["auto", "reference", "triton"] = knob(
        "auto", doc="Rotary position embedding, and the assembly of latent attention's heads."
    )
    delta: OperatorBackend = knob(
        "auto", doc="Linear attention: position by position (reference), by chunks (torch), or ours."
    )
    sparse: Literal["auto", "reference", "triton"] = knob(
        "auto",
        doc="Sparse attention: all keys under a mask (reference), or the chosen keys alone, whose gradients are summed "
        "in any order.",
    )
    attention: Literal["auto", "default", "math", "flash", "efficient", "cudnn", "flash-4", "triton"] = knob(
        "auto",
        doc="Backend of scaled_dot_product_attention, default leaves it to torch; or the package flash-attn-4. auto "
        "prefers that one where it is installed on Hopper, and cuDNN elsewhere and for sinks. Within documents auto "
        "takes our kernel on Hopper, within windows and chunks on every GPU, triton always.",
    )
    float8: Literal["auto", "reference", "triton", "torch"] = knob(
        "auto",
        doc="Products in 8 bits; torch takes cuBLAS for the dense ones that it can on Hopper, and ours elsewhere, as "
        "auto does.",
    )
    loss_chunk: int = knob(0, doc="Tokens whose logits exist at once; 0 chooses by size.", unit="tokens", low=0)
    measured: str = knob(
        "", doc="File of `penstock kernels tune` to choose by; empty looks in ~/.config/penstock/kernels."
    )


class Run(Section):
    """One training run."""

    name: str = knob(doc="Name of the run and of its folder.")
    # The largest seed that numpy takes.
    seed: int = knob(0, doc="Seed of weights, data order and everything random.", low=0, high=2**32 - 1)
    device: Literal["auto", "cpu", "cuda"] = knob("auto", doc="Device; auto takes a GPU if there is one.")
    model: Model = knob(doc="The model.")
    training: Training = knob(doc="Batch, length, precision.")
    optimizer: Optimizer = knob(doc="Update of the weights.")
    schedule: LearningRateSchedule = knob(LearningRateSchedule(), doc="Learning rate over the steps.")
    data: Data = knob(Data(), doc="Text.")
    evaluation: Evaluation = knob(Evaluation(), doc="Loss on held-out text.")
    checkpoint: Checkpoint = knob(Checkpoint(), doc="Saved states.")
    kernels: Kernels = knob(Kernels(), doc="Implementations.")
    float8: Float8 = knob(Float8(), doc="Products in 8 bits.")
    record: Record = knob(Record(), doc="Metrics.")
    profile: Profile = knob(Profile(), doc="Traces of a few steps.")
    parallel: Parallel = knob(Parallel(), doc="Parallel sizes.")
    dispatch: Dispatch = knob(Dispatch(), doc="Transport of tokens to their experts.")
    pipeline: Pipeline = knob(Pipeline(), doc="Order and division of the pipeline.")
    recompute: Recompute = knob(Recompute(), doc="Activations that are recomputed to save memory.")
    offload: Offload = knob(Offload(), doc="State in host memory.")
    graphs: Graphs = knob(Graphs(), doc="Work that is captured once and replayed.")
    host: Host = knob(Host(), doc="Processes on their machine.")
    elastic: Elastic = knob(Elastic(), doc="Fewer ranks after a loss.")

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one optimizer step over all ranks."""
        return self.training.global_batch * self.training.sequence_length  # rows x positions


def with_values(run: Run, **sections: Mapping[str, object]) -> Run:
    """The run with other values of sections, such as `parallel={"tensor": 2}`, which are not checked."""
    return run.model_copy(update={name: vars(run)[name].model_copy(update=sections[name]) for name in sections})
