"""A run: all fields that decide what `penstock train` does. Sources of text are described in docs/data.md."""

from collections.abc import Mapping
from functools import partial
from typing import Literal

from penstock.config.model import Model
from penstock.config.parallel import Dispatch, Elastic, Graphs, Host, Offload, Parallel, Pipeline, Recompute
from penstock.config.schema import Section, knob

SourceOfText = Literal["standard-library", "text", "jsonl", "parquet", "packed", "huggingface"]  # packed: its tokens
SourceName = Literal[SourceOfText, "synthetic-random", "synthetic-learnable"]

_share = partial(knob, low=0.0, high=1.0)


class Documents(Section):
    """One source of documents."""

    source: SourceName = knob(
        "standard-library",
        doc="Source of documents; standard-library is the source code of the running Python, packed is tokens.",
    )
    files: tuple[str, ...] = knob(
        (),
        doc="Files, folders or globs of `text` (a document each), `jsonl` (a document a line), `parquet` or Arrow "
        "(a document a row), `packed` (pairs of .bin and .idx). Text and lines may be .gz, .bz2, .xz or .zst.",
    )
    validation_files: tuple[str, ...] = knob(
        (), doc="The same, held out; none holds out a share of the documents of `files`."
    )
    text_field: str = knob("text", doc="Field of a JSON line, or column of a table or dataset, that holds the text.")
    dataset: str = knob("", doc="Hugging Face dataset by its name on the hub, or a folder that `datasets` can read.")
    dataset_config: str = knob("", doc="Configuration of the dataset, such as a language; empty is its default.")
    split: str = knob("train", doc="Split of the dataset to train on.")
    validation_split: str = knob("", doc="Split that is held out; empty holds out a share of the documents of `split`.")
    revision: str = knob("", doc="Revision of the dataset on the hub; empty is the newest, which may change.")
    streaming: bool = knob(False, doc="Read the dataset while training, with no copy of it on this machine.")


class MixturePart(Documents):
    """One part of a mixture, under a name of its own."""

    source: SourceOfText = knob(doc="As `data.source`.")
    weight: float = knob(doc="Share of the tokens that come from this part, over the sum of all weights.", low=0.0)


class Data(Documents):
    """Text."""

    mixture: dict[str, MixturePart] = knob(
        {}, doc="Parts by name, each with a weight; then the fields above are those of the parts."
    )
    validation_share: float = knob(
        0.02, doc="Share of documents held out; of too few documents, the end of each.", low=0.0, high=0.5
    )
    tokenizer: str = knob(
        "bytes",
        doc="`bytes`, or the path of a tokenizer.json, of a folder with one, of a sentencepiece .model, or of ranks of "
        "tiktoken with their pattern, as in `ranks.tiktoken:cl100k`; see docs/tokenizers-and-packing.md.",
    )
    end_of_document: str = knob(
        "", doc="Name of the token that ends a document; empty takes the tokenizer's. For packed sources also an id."
    )
    corrupt: Literal["stop", "skip"] = knob(
        "stop", doc="An unreadable record ends the run, or is skipped, counted and named."
    )
    fill_in_middle: float = _share(
        0.0, doc="Share of training documents whose middle comes last (fill-in-the-middle, arXiv 2207.14255)."
    )
    fill_in_middle_spm: float = _share(
        0.5, doc="Share of these in the order suffix, prefix, middle; the others are prefix, suffix, middle."
    )
    fill_in_middle_tokens: tuple[str, ...] = knob(
        (), doc="Names of the tokens before prefix, suffix and middle; empty finds the usual ones."
    )
    document_mask: bool = knob(
        False,
        doc="Attention stays inside a document, and positions restart at each. Where our kernel does not run "
        "(`kernels.attention`), each pass makes a mask, a byte for each pair of positions of a row, and attention "
        "needs more.",
    )
    shuffle: bool = knob(True, doc="Visit documents in another order each epoch, 32 side by side.")
    shuffle_block: int = knob(
        1024,
        doc="Neighbouring documents of a streamed dataset's shard that are put in random order.",
        unit="documents",
        low=1,
    )
    cache: str = knob("", doc="Folder for decompressed copies of files; empty is `cache` in record.folder.")


_steps = partial(knob, unit="steps", low=0)


class Training(Section):
    """Batch, length, precision."""

    steps: int = _steps(doc="Optimizer steps.", low=1)
    sequence_length: int = knob(doc="Positions of a row.", unit="positions", low=2, high=2**30)
    micro_batch: int = knob(1, doc="Rows of one forward pass on one rank.", unit="rows", low=1, high=2**20)
    global_batch: int = knob(1, doc="Rows of one optimizer step over all ranks.", unit="rows", low=1, high=2**30)
    precision: Literal["bf16", "fp32"] = knob(
        "bf16", doc="bf16: parameters and compute in bfloat16, master weights, moments and gradients in float32."
    )
    initial_weights: str = knob(
        "", doc="Folder of `penstock import`, or of a run, whose weights a new run starts with; empty draws them."
    )
    mtp_weight: float = knob(0.3, doc="Factor of the multi-token prediction loss.", low=0.0)
    z_loss_coef: float = knob(0.0, doc="Factor of the z-loss on the output logits.", low=0.0)
    clip_norm: float = knob(1.0, doc="Largest global gradient norm; 0 does not clip.", low=0.0)
    deterministic: bool = knob(False, doc="Use deterministic algorithms only; slower on GPUs.")
    collect_garbage_every: int = _steps(
        50, doc="Python garbage is collected every so many steps and never inside a step; 0 leaves it to Python."
    )


class Muon(Section):
    """Muon for the matrices of hidden layers (arXiv 2502.16982); read with `optimizer.method` muon."""

    momentum: float = knob(0.95, doc="Decay of the momentum.", low=0.0, high=1.0)
    nesterov: bool = knob(True, doc="Orthogonalize the mean of gradient and momentum instead of the momentum.")
    iterations: int = knob(5, doc="Newton-Schulz iterations.", low=1, high=20)
    precision: Literal["bf16", "fp32"] = knob(
        "bf16", doc="Type of Newton-Schulz products, and of the matrices that ranks exchange for them."
    )
    update_rms: float = knob(
        0.2,
        doc="Root mean square of an update of an A x B matrix over the learning rate, about: the orthogonal factor is "
        "multiplied by this and the root of max(A, B). 0.2 is that of AdamW, so its learning rates can stay.",
        low=0.0,
    )
    qk_clip: float = knob(
        0.0,
        doc="Largest attention logit that a step may have without its head's queries and keys being scaled down "
        "after the update (Kimi-K2: 100); 0 switches it off. Costs a product of queries and keys in each pass.",
        low=0.0,
    )


class Optimizer(Section):
    """AdamW (arXiv 1711.05101), or Muon with AdamW for embeddings, head, norms, routers and vectors."""

    method: Literal["adamw", "muon"] = knob(
        "adamw", doc="adamw: for all parameters. muon: orthogonalizes updates of matrices. See docs/optimizer.md."
    )
    muon: Muon = knob(Muon(), doc="Muon.")
    learning_rate: float = knob(doc="Peak learning rate.", low=0.0)
    beta1: float = knob(0.9, doc="Decay of the first moment.", low=0.0, high=1.0)
    beta2: float = knob(0.95, doc="Decay of the second moment.", low=0.0, high=1.0)
    epsilon: float = knob(1e-8, doc="Added to the root of the second moment.", low=0.0)
    weight_decay: float = knob(0.1, doc="Decoupled decay of matrices; norms and biases are never decayed.", low=0.0)
    moment_dtype: Literal["fp32", "bf16", "int8"] = knob(
        "fp32",
        doc="Type in which both moments are stored: 8, 4 or 2 bytes of the two. int8 has a float32 scale for each 128 "
        "values of a row, and leaves vectors in float32. See docs/optimizer.md.",
    )
    store_param_remainders: bool = knob(
        False,
        doc="Masters of bfloat16 weights are the weight and the 16 bits that are missing to float32, in 2 bytes "
        "instead of 4; the same numbers. Weights held in float32, such as FSDP2's shards, are their own masters.",
    )


class LearningRateSchedule(Section):
    """Learning rate over the steps: linear warm-up, then a decay."""

    warmup_steps: int = _steps(0, doc="Steps of linear warm-up from 0.")
    decay: Literal["constant", "cosine", "linear", "wsd"] = knob(
        "cosine",
        doc="After warm-up: constant, cosine, linear, or warm-up-stable-decay (constant, then linear at the end).",
    )
    decay_steps: int = _steps(0, doc="Steps of the final decay of `wsd`; 0 means a tenth of all steps.")
    final_ratio: float = knob(0.1, doc="Learning rate at the last step over the peak.", low=0.0, high=1.0)


class Evaluation(Section):
    """Loss on held-out text."""

    every: int = _steps(0, doc="Steps between evaluations; 0 evaluates only at the end.")
    rows: int = knob(64, doc="Rows of held-out text; 0 switches evaluation off.", unit="rows", low=0, high=2**30)


class Checkpoint(Section):
    """Saved states."""

    enabled: bool = knob(True, doc="Save at all; a run without checkpoints cannot be resumed.")
    every: int = _steps(1000, doc="Steps between checkpoints; 0 saves only at the end.")
    keep: int = knob(
        3,
        doc="Checkpoints that are kept, the newest first; 0 keeps all. On a full disk fewer, to make room.",
        unit="checkpoints",
        low=0,
    )
    keep_every: int = _steps(0, doc="Checkpoints of multiples of so many steps are kept beyond `keep`; 0 keeps none.")
    asynchronous: bool = knob(True, doc="Write in the background while training goes on.")
    fall_back: bool = knob(True, doc="Resume from the checkpoint before a damaged one; false ends the run instead.")


class Record(Section):
    """Output of a run besides checkpoints."""

    folder: str = knob("runs", doc="Folder that holds one folder for each run.")
    every: int = _steps(1, doc="Steps between lines of metrics.jsonl.", low=1)
    tensorboard: bool = knob(True, doc="Write TensorBoard events.")
    wandb: Literal["off", "offline", "online"] = knob(
        "off", doc="Tell Weights & Biases: in files for `wandb sync`, or over the network; needs penstock[wandb]."
    )
    wandb_project: str = knob("penstock", doc="Project there.")
    prometheus_port: int = knob(
        0,
        doc="Port of an endpoint for Prometheus on the first rank's machine; 0 has none; needs penstock[prometheus].",
        low=0,
        high=65535,
    )
    prometheus_address: str = knob(
        "127.0.0.1", doc="Address of the endpoint: the loopback is for this machine only, 0.0.0.0 is for all machines."
    )


class Profile(Section):
    """Recording of a few steps by torch's profiler; see docs/trace.md."""

    start: int = _steps(0, doc="First step that is recorded; 0 records none.")
    steps: int = _steps(2, doc="Steps that are recorded.", low=1)
    ranks: tuple[int, ...] = knob(
        (0, 1, 2, 3, 4, 5, 6, 7), doc="Ranks that record, as far as the run has them; empty means all."
    )
    memory: bool = knob(True, doc="On a GPU, record every block that the allocator hands out or takes back.")


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


class Qat(Section):
    """Quantization-aware training: products read weights rounded to the format in which the model will be served.

    Masters, gradients and the optimizer's state keep their precision. See docs/weights.md.
    """

    experts: Literal["none", "mxfp4"] = knob(
        "none", doc="Format of the routed experts' matrices: mxfp4 has 4 bits, and a scale for each 32 inputs."
    )


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
    qat: Qat = knob(Qat(), doc="Weights in the format of serving.")
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
