"""Rules of batch, schedule, devices, `float8`, `qat` and `data`. Each docstring is the rule as users read it.

Fields of a source are in `data`, or in each part of `data.mixture`; most rules check all of these places.
"""

import re
from collections.abc import Iterator
from dataclasses import replace

from penstock.config.fit import context_method, layout_sizes, shard, smallest_world
from penstock.config.model import GroupedQueryAttention, LatentAttention
from penstock.config.run import Documents, Run
from penstock.config.schema import Problem, fields_of, multiples_near

MXFP4_BLOCK = 32  # inputs that share a scale, as in penstock.kernels.mxfp4
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


def name_is_a_folder_name(run: Run) -> Problem | None:
    """`name` is a plain folder name: letters, digits, dots, dashes and underscores, the first a letter or digit."""
    if _NAME.fullmatch(run.name):
        return None
    return Problem.from_line(
        f"name must be a plain folder name; got {run.name[:110]!r}; "
        "allowed: up to 100 letters, digits, '.', '_' and '-', the first a letter or digit"
    )


def gradients_on_the_host_follow_their_layers(run: Run) -> Problem | None:
    """`offload.gradients` needs `offload.optimizer`, and `dispatch.overlap` none or shared."""
    if not run.offload.gradients:
        return None
    if not run.offload.optimizer:
        return Problem.from_line(
            "offload.gradients needs the rest of the optimizer's state there too; got offload.optimizer false; "
            "fix: set offload.optimizer=true"
        )
    if run.dispatch.overlap == "passes":
        return Problem.from_line(
            "offload.gradients needs the backward passes of layers one after another; "
            "got dispatch.overlap passes; allowed: none, shared; fix: set dispatch.overlap=none"
        )
    return None


def micro_batches_fill_the_global_batch(run: Run) -> Problem | None:
    """`training.micro_batch` divides `training.global_batch`."""
    training = run.training
    if training.global_batch % training.micro_batch == 0:
        return None
    near = multiples_near(training.global_batch, training.micro_batch)
    return Problem.from_line(
        f"training.global_batch must be a multiple of training.micro_batch ({training.micro_batch}); "
        f"got {training.global_batch}; fix: set training.global_batch to {near}"
    )


def rows_hold_every_prediction_depth(run: Run) -> Problem | None:
    """`model.mtp_layers` is less than `training.sequence_length`: each depth looks one position further."""
    if run.model.mtp_layers < run.training.sequence_length:
        return None
    return Problem.from_line(
        f"model.mtp_layers must be less than training.sequence_length ({run.training.sequence_length}); "
        f"got {run.model.mtp_layers}"
    )


def warmup_ends(run: Run) -> Problem | None:
    """`schedule.warmup_steps` is at most `training.steps`."""
    if run.schedule.warmup_steps <= run.training.steps:
        return None
    return Problem.from_line(
        f"schedule.warmup_steps is more than training.steps ({run.training.steps}); got {run.schedule.warmup_steps}; "
        f"allowed: 0 to {run.training.steps}; "
        f"fix: shorten the warm-up too: schedule.warmup_steps={run.training.steps // 10}"
    )


def decay_comes_after_warmup(run: Run) -> Problem | None:
    """`schedule.decay_steps` fits into the steps after `schedule.warmup_steps`."""
    room = run.training.steps - run.schedule.warmup_steps
    if run.schedule.decay_steps <= room or room < 0:  # a warm-up that is too long is a fault of its own
        return None
    return Problem.from_line(
        f"schedule.decay_steps is more than the {room} steps after the warm-up; got {run.schedule.decay_steps}; "
        f"allowed: 0 to {room}"
    )


def decay_steps_belong_to_wsd(run: Run) -> Problem | None:
    """`schedule.decay_steps` is for `schedule.decay` wsd only: the others decay over all steps after the warm-up."""
    if run.schedule.decay_steps == 0 or run.schedule.decay == "wsd":
        return None
    return Problem.from_line(
        f"schedule.decay_steps has no meaning for schedule.decay {run.schedule.decay}; got {run.schedule.decay_steps}; "
        "fix: set schedule.decay to wsd, or schedule.decay_steps to 0"
    )


def moments_forget(run: Run) -> Problem | None:
    """`optimizer.beta1`, `optimizer.beta2` and `optimizer.muon.momentum` are below 1."""
    # The range of the fields includes 1.
    settings = run.optimizer
    for name, beta in (("beta1", settings.beta1), ("beta2", settings.beta2), ("muon.momentum", settings.muon.momentum)):
        if beta == 1:
            return Problem(f"optimizer.{name}", "must be below 1", got="1", fix="0.9 and 0.95 are the usual values")
    return None


def muon_stays_on_the_device(run: Run) -> Problem | None:
    """`optimizer.method` muon keeps its state on the device: `offload.optimizer` is false."""
    if run.optimizer.method != "muon" or not run.offload.optimizer:
        return None
    return Problem.from_line(
        "optimizer.method muon keeps masters and momentum on the device; got offload.optimizer true; "
        "fix: set offload.optimizer=false, or optimizer.method=adamw"
    )


def clipped_logits_are_of_weights(run: Run) -> Problem | None:
    """`optimizer.muon.qk_clip` is for `optimizer.method` muon and attention whose logits follow the weights.

    So queries and keys have no norm, no layer has a window, an indexer or a temperature, and `parallel.context` is 1.
    """
    if not run.optimizer.muon.qk_clip:
        return None
    attention, obstacles = run.model.attention, []
    if run.optimizer.method != "muon":
        obstacles.append(f"optimizer.method {run.optimizer.method}")
    if not isinstance(attention, GroupedQueryAttention):
        obstacles += ["model.attention.indexer"] if attention.indexer is not None else []
    else:
        obstacles += ["model.attention.qk_norm"] if attention.qk_norm != "none" else []
        obstacles += ["model.attention.local"] if attention.local is not None else []
    if run.parallel.context > 1:
        obstacles.append(f"parallel.context {run.parallel.context}")
    if not obstacles:
        return None
    return Problem.from_line(
        "optimizer.muon.qk_clip needs Muon, and queries and keys that follow their weights on one rank of a row; "
        f"got {obstacles[0]}; fix: set optimizer.muon.qk_clip=0"
    )


def cpu_has_the_backend(run: Run) -> Problem | None:
    """With `device` cpu, no field of `kernels` (`kernels.all`, `kernels.experts`, ...) is triton: it needs a GPU.

    Nor is `kernels.attention` efficient, cudnn or flash-4.
    """
    for name, backend in run.kernels if run.device == "cpu" else ():
        if backend == "triton" or (name == "attention" and backend in ("efficient", "cudnn", "flash-4")):
            return Problem.from_line(
                f"kernels.{name} names a backend that device cpu does not have; got {backend}; "
                f"fix: set kernels.{name} to auto"
            )
    return None


def flash_heads_are_equally_wide(run: Run) -> Problem | None:
    """`kernels.attention` flash needs latent attention's query/key and value heads equally wide."""
    attention = run.model.attention
    is_flash = run.kernels.attention == "flash"
    if not is_flash or not isinstance(attention, LatentAttention) or attention.head_dim == attention.v_head_dim:
        return None
    return Problem.from_line(
        "kernels.attention flash needs model.attention.v_head_dim = qk_nope_head_dim + qk_rope_head_dim; "
        f"got {attention.v_head_dim} and {attention.head_dim}; fix: set kernels.attention to auto"
    )


def flash_on_a_gpu_has_no_mask(run: Run) -> Problem | None:
    """`kernels.attention` flash takes no mask on a GPU (`device` cuda).

    Masks are needed by `data.document_mask`, `parallel.context_method` all-gather, and windows of
    `model.attention.local.size` below `training.sequence_length`.
    """
    asking = _masked_by(run)
    if run.kernels.attention != "flash" or run.device != "cuda" or asking is None:
        return None
    return Problem.from_line(
        f"kernels.attention flash takes no mask on a GPU, and {asking} needs one; fix: set kernels.attention to auto"
    )


def _masked_by(run: Run) -> str | None:
    """The option that needs a mask in attention, or None."""
    if run.data.document_mask:
        return "data.document_mask"
    if run.parallel.context > 1 and context_method(run) == "all-gather":  # two chunks of a row are no causal prefix
        return "parallel.context_method all-gather"
    attention = run.model.attention
    local = attention.local if isinstance(attention, GroupedQueryAttention) else None
    is_window = local is not None and local.kind == "window" and local.size < run.training.sequence_length
    return "model.attention.local, a window," if is_window else None


def recorded_steps_are_made(run: Run) -> Problem | None:
    """With `profile.start` above 0, all `profile.steps` from there on are within `training.steps`."""
    profile, steps = run.profile, run.training.steps
    if profile.start == 0 or profile.start + profile.steps - 1 <= steps:  # steps are counted from 1
        return None
    if profile.steps > steps:
        return Problem("profile.steps", f"is more than training.steps ({steps})", got=f"{profile.steps}")
    return Problem.from_line(
        f"profile.start leaves fewer than profile.steps ({profile.steps}) of training.steps ({steps}); "
        f"got {profile.start}; allowed: 0 to {steps - profile.steps + 1}"
    )


def recording_ranks_are_ranks(run: Run) -> Problem | None:
    """`profile.ranks` holds numbers from 0, each once."""
    ranks = run.profile.ranks
    if len({*ranks}) == len(ranks) and min(ranks, default=0) >= 0:
        return None
    return Problem("profile.ranks", "must be numbers of ranks, each once", got=f"{list(ranks)}", allowed="0, 1, 2, ...")


def eight_bits_have_experts(run: Run) -> Problem | None:
    """`float8.experts` and `float8.dispatch` other than none need `model.moe`."""
    if run.model.moe is not None:
        return None
    for field, value in (("experts", run.float8.experts), ("dispatch", run.float8.dispatch)):
        if value != "none":
            what = "needs experts, which the model lacks (model.moe)"
            return Problem(f"float8.{field}", what, got=value, allowed="none", fix=f"set float8.{field}=none")
    return None


def experts_fit_their_format(run: Run) -> Problem | None:
    """`qat.experts` needs `model.moe` and `float8.experts` none, and whole blocks of 32 along the inputs of matrices.

    So `model.hidden_size` and a rank's share of `model.moe.moe_intermediate_size` (`parallel.expert_tensor`) are
    multiples of 32.
    """
    moe, off = run.model.moe, {"got": run.qat.experts, "allowed": "none", "fix": "set qat.experts=none"}
    if run.qat.experts == "none":
        return None
    if moe is None:
        return Problem("qat.experts", "needs experts, which the model lacks (model.moe)", **off)
    if run.float8.experts != "none":
        return Problem("qat.experts", f"is for products in 16 bits, but float8.experts is {run.float8.experts}", **off)
    ranks = run.parallel.expert_tensor
    widths = {"hidden_size": run.model.hidden_size, "moe.moe_intermediate_size": moe.moe_intermediate_size // ranks}
    for field, width in widths.items():
        if width % MXFP4_BLOCK:
            got = f"{width} on each of {ranks} ranks" if ranks > 1 and "moe" in field else f"{width}"
            what = f"leaves qat.experts={run.qat.experts} a block of fewer than {MXFP4_BLOCK} inputs"
            allowed = f"multiples of {MXFP4_BLOCK}"
            return Problem(f"model.{field}", what, got=got, allowed=allowed, fix="set qat.experts=none")
    return None


def eight_bits_fit_the_head(run: Run) -> Problem | None:
    """`float8.head` needs `model.hidden_size` and a rank's share of `model.vocab_size` to be multiples of 16."""
    if run.float8.head == "none":
        return None
    hidden, tokens, ranks = run.model.hidden_size, run.model.vocab_size, run.parallel.tensor
    for field, size in (("hidden_size", hidden), ("vocab_size", tokens // ranks)):
        if size % 16:
            what = f"leaves float8.head a matrix whose {field} is no multiple of 16"
            got = f"{size} on each of {ranks} ranks" if ranks > 1 and field == "vocab_size" else f"{size}"
            return Problem(f"model.{field}", what, got=got, allowed="multiples of 16", fix="set float8.head=none")
    return None


def layers_are_left_for_eight_bits(run: Run) -> Problem | None:
    """`float8.first_layers` + `float8.last_layers` stay below `model.layers` if anything in layers is in 8 bits."""
    first, last, layers = run.float8.first_layers, run.float8.last_layers, run.model.layers
    if not run.float8.is_in_layers or first + last < layers:  # some layer is in 8 bits
        return None
    return Problem.from_line(
        f"float8.first_layers and float8.last_layers leave none of the {layers} layers in 8 bits; got {first} and "
        f"{last}; fix: set both to 0, or float8.dense=none, float8.experts=none and float8.dispatch=none"
    )


def gathered_bits_are_multiplied(run: Run) -> Problem | None:
    """`float8.gather` needs `parallel.shard` full, and `float8.dense` or `float8.experts` other than none.

    Neither is rowwise or mxfp8: they quantize a weight in two ways, for each of its products, and both would travel.
    """
    recipes = {"dense": run.float8.dense, "experts": run.float8.experts}
    if not run.float8.gather:
        return None
    if shard(run) != "full":
        what, got = "gathers what FSDP divides, so it needs parallel.shard=full", f"true with {shard(run)}"
        return Problem("float8.gather", what, got=got, allowed="false", fix="set float8.gather=false")
    if set(recipes.values()) == {"none"}:
        what = "gathers weights that nothing multiplies in 8 bits"
        return Problem("float8.gather", what, got="true", allowed="false", fix="set float8.gather=false")
    for field, recipe in recipes.items():
        if recipe in ("rowwise", "mxfp8"):  # scales along rows: a transposed weight has others
            return Problem.from_line(
                f"float8.{field} has two copies of each weight, and float8.gather sends one; got {recipe}; "
                "allowed: none, auto, tensorwise, blockwise, blockwise-square; fix: set float8.gather=false"
            )
    return None


def fewer_ranks_hold_what_does_not_shrink(run: Run) -> Problem | None:
    """`elastic.min` needs `checkpoint.enabled`, and is a multiple of the ranks of sizes that do not shrink.

    These are `parallel.pipeline` x `parallel.context` x `parallel.tensor`, and of stages whose experts are shared by
    `parallel.expert_tensor` the least common multiple.
    """
    got, least = str(run.elastic.min), smallest_world(replace(layout_sizes(run), ep=1))
    if run.elastic.min and not run.checkpoint.enabled:
        return Problem("elastic.min", "needs checkpoints to go on from", got=got, fix="checkpoint.enabled=true")
    if run.elastic.min % least == 0:
        return None
    sizes = ", ".join(
        f"{name} {size}"
        for name in ("pipeline", "tensor", "context", "expert_tensor")
        if (size := dict(run.parallel)[name]) > 1
    )
    wrong = f"is no multiple of the {least} ranks of sizes that do not shrink (parallel: {sizes})"
    return Problem("elastic.min", wrong, got=got, allowed=f"0, or a multiple of {least}")


FILE_SOURCES = ("text", "jsonl", "parquet", "packed")  # sources that read `files`
SYNTHETIC_SOURCES = ("synthetic-random", "synthetic-learnable")  # sources without text
_DATASET_FIELDS = ("dataset", "dataset_config", "split", "validation_split", "revision", "streaming")
_PART_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,49}")
BYTES_VOCABULARY = 257  # 256 values of a byte and the end of a document
_LEARNABLE_VOCABULARY = 5  # the synthetic language continues in one of 4 ways, and needs an end of document


def _places(run: Run) -> Iterator[tuple[str, Documents]]:
    """Every source of documents, with the path of its fields."""
    if not run.data.mixture:
        yield "data", run.data
    for name, part in run.data.mixture.items():
        yield f"data.mixture.{name}", part


def bytes_are_encoded(run: Run) -> bool:
    """Whether text is encoded with `data.tokenizer` bytes."""
    # Text, not tokens.
    is_encoded = any(documents.source not in (*SYNTHETIC_SOURCES, "packed") for _, documents in _places(run))
    return is_encoded and run.data.tokenizer == "bytes"


def a_mixture_is_of_parts_only(run: Run) -> Problem | None:
    """With `data.mixture`, fields of `data` that its parts have too, such as `data.source`, keep their defaults."""
    if not run.data.mixture:
        return None
    given = dict(run.data)  # values by field
    for name, field in fields_of(Documents).items():
        if given[name] != field.default:
            return Problem.from_line(
                f"data.{name} is given beside data.mixture, whose parts have their own; "
                f"fix: leave it out, or move it to data.mixture.{next(iter(run.data.mixture))}.{name}"
            )
    return None


def parts_have_a_name_and_weight(run: Run) -> Problem | None:
    """Names in `data.mixture` are letters, digits, dashes and underscores.

    Each `data.mixture.NAME.weight` is above 0.
    """
    for name, part in run.data.mixture.items():
        if not _PART_NAME.fullmatch(name):
            return Problem.from_line(
                f"data.mixture has a part without a plain name; got {name[:60]!r}; "
                "allowed: up to 50 letters, digits, '_' and '-', the first a letter or digit"
            )
        if part.weight == 0:
            return Problem(f"data.mixture.{name}.weight", "must be above 0", got="0", fix="or leave the part out")
    return None


def files_are_of_file_sources(run: Run) -> Problem | None:
    """`data.source` text, jsonl, parquet and packed need `data.files`; the same of parts of `data.mixture`.

    `data.files` and `data.validation_files` are for these sources only.
    """
    for path, documents in _places(run):
        reads, given = documents.source in FILE_SOURCES, documents.files or documents.validation_files
        if reads and not documents.files:
            return Problem.from_line(
                f"{path}.files is empty, but {path}.source {documents.source} reads files; "
                f"fix: set {path}.files to the files to train on"
            )
        if given and not reads:
            name = "files" if documents.files else "validation_files"
            return Problem.from_line(
                f"{path}.{name} is given, but {path}.source {documents.source} reads no files; "
                f"got {', '.join(given[:3])}; fix: set {path}.source to text, jsonl, parquet or packed"
            )
    return None


def held_out_text_is_not_trained_on(run: Run) -> Problem | None:
    """No file is in both `data.files` and `data.validation_files`, and `data.validation_split` is not `data.split`."""
    for path, documents in _places(run):
        # As they are written; globs are not expanded.
        shared = [name for name in documents.files if name in documents.validation_files]
        if shared:
            return Problem.from_line(
                f"{path}.validation_files has files of {path}.files: the model would be judged on what it learned; "
                f"got {', '.join(shared[:3])}; fix: take them out of one of the two"
            )
        if documents.source == "huggingface" and documents.validation_split == documents.split:
            return Problem.from_line(
                f"{path}.validation_split is {path}.split: the model would be judged on what it learned; "
                f"got {documents.split}; fix: leave it out to hold out a share of the documents"
            )
    return None


def datasets_have_a_name(run: Run) -> Problem | None:
    """`data.source` huggingface needs `data.dataset` and `data.split`; other sources have no field of a dataset."""
    for path, documents in _places(run):
        values = dict(documents)
        if documents.source == "huggingface":
            missing = next((name for name in ("dataset", "split") if not values[name]), None)
            if missing is not None:
                return Problem(f"{path}.{missing}", f"is empty, but {path}.source huggingface needs it")
            continue  # the rest is about other sources
        for name in _DATASET_FIELDS:
            if values[name] != fields_of(Documents)[name].default:
                return Problem.from_line(
                    f"{path}.{name} is given, but {path}.source {documents.source} is no dataset of Hugging Face; "
                    f"fix: leave it out, or set {path}.source to huggingface"
                )
    return None


def evaluation_has_text(run: Run) -> Problem | None:
    """`evaluation.rows` above 0 need held-out text: `data.validation_files`, or `data.validation_share` above 0."""
    is_held_out = run.data.validation_share > 0 or any(
        documents.validation_files or documents.validation_split or documents.source in SYNTHETIC_SOURCES
        for _, documents in _places(run)
    )
    if run.evaluation.rows == 0 or is_held_out:
        return None
    return Problem.from_line(
        "data.validation_share holds out no text for evaluation.rows; got 0; "
        "fix: raise it, give data.validation_files, or set evaluation.rows to 0"
    )


def vocabulary_holds_every_token(run: Run) -> Problem | None:
    """With `data.tokenizer` bytes, `model.vocab_size` is at least 257: 256 bytes and the end of a document.

    With `data.source` synthetic-learnable it is at least 5.
    """
    if bytes_are_encoded(run):
        option, least, why = "data.tokenizer bytes", BYTES_VOCABULARY, " (256 bytes and the end of a document)"
    elif run.data.source == "synthetic-learnable":
        option, least, why = "data.source synthetic-learnable", _LEARNABLE_VOCABULARY, ""
    else:
        return None
    if run.model.vocab_size >= least:
        return None
    return Problem.from_line(
        f"model.vocab_size is too small for {option}; got {run.model.vocab_size}; allowed: >= {least}{why}"
    )


def bytes_have_one_end(run: Run) -> Problem | None:
    """With `data.tokenizer` bytes, `data.end_of_document` stays empty; of packed tokens it may be an id in digits."""
    end = run.data.end_of_document
    packed = [part for _, part in _places(run) if part.source == "packed"]  # whose ids may be of any tokenizer
    if not end or run.data.tokenizer != "bytes" or (packed and end.isdecimal()):
        return None
    return Problem.from_line(
        "data.end_of_document names a token, but data.tokenizer bytes has its own end of a document; "
        f"got {run.data.end_of_document!r}; fix: leave it out, or set data.tokenizer to a tokenizer.json"
    )


def middles_are_of_text(run: Run) -> Problem | None:
    """`data.fill_in_middle` above 0 needs text: `data.source` is not packed and not synthetic.

    And it needs three tokens, which `data.tokenizer` bytes does not have.
    """
    if run.data.fill_in_middle == 0:
        return None
    for path, documents in _places(run):
        if documents.source == "packed" or documents.source in SYNTHETIC_SOURCES:
            return Problem.from_line(
                f"data.fill_in_middle cuts text, and {path}.source {documents.source} has tokens; "
                f"got {run.data.fill_in_middle:g}; fix: set it to 0, or train on the text itself"
            )
    if run.data.tokenizer != "bytes":
        return None
    return Problem.from_line(
        "data.fill_in_middle needs tokens before prefix, suffix and middle, which data.tokenizer bytes does not have; "
        "fix: set it to 0, or set data.tokenizer to a tokenizer.json"
    )


def middles_have_three_tokens(run: Run) -> Problem | None:
    """`data.fill_in_middle_tokens` are three different names, or none."""
    names = run.data.fill_in_middle_tokens
    if not names or len(names) == len({*names}) == 3:  # prefix, suffix, middle
        return None
    return Problem.from_line(
        "data.fill_in_middle_tokens must be three different names, of the tokens before prefix, suffix and middle; "
        f"got {', '.join(names)}"
    )
