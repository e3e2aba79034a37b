"""Which kernels run and why: config, obstacles, measurements, defaults; and the resulting operators."""

from collections.abc import Mapping
from dataclasses import replace
from typing import get_args

import pytest
import torch

from penstock.base.devices import chips
from penstock.base.errors import DeviceError, KernelError
from penstock.config.run import Kernels
from penstock.kernels import backends
from penstock.kernels.backends import BACKENDS, CHOICE_POINTS, FIELDS, PART_SIZES, PRODUCTS, Shapes, has, shape_of
from penstock.kernels.choose import (
    MASKED,
    Choice,
    Measurements,
    OperatorTimes,
    choose,
    obstacle,
    operators,
    shown,
    summary,
)
from penstock.kernels.operators import REFERENCE, TORCH
from penstock.kernels.tuning import GROUPED_GEMM, DeviceFacts, device_facts, installed, named_device
from tests.closeness import assert_close
from tests.kernels.expert_batch import draw_batch

SHAPES = Shapes(
    tokens=8192,
    hidden=2048,
    experts=64,
    expert_groups=1,
    top_k=6,
    ffn=1408,
    dense_ffn=2816,
    attention="mla",
    heads=16,
    head_dim=192,
    rotary_dim=64,
    value_dim=128,
    linear_key_heads=16,
    linear_value_heads=32,
    linear_key_dim=128,
    linear_value_dim=128,
    linear_decays=1,
    index_heads=64,
    latent_dim=512,
)
DENSE = replace(SHAPES, experts=0, top_k=0, ffn=0)
H200 = named_device("H200", "bf16")
CPU = DeviceFacts(kind="cpu", name="CPU", target="interpreter", packages=frozenset({"triton"}), dtype="fp32")
NO_TRITON = replace(H200, packages=frozenset())


def chosen(
    device: DeviceFacts = H200, shapes: Shapes = SHAPES, measured: Measurements | None = None, **wanted: str
) -> dict[str, str]:
    """Backend by choice point, `experts forward` for the first product."""
    choices = choose(wanted, device, shapes, measured)
    return {key(one): one.backend for one in choices}


def reasons(
    device: DeviceFacts = H200, shapes: Shapes = SHAPES, measured: Measurements | None = None, **wanted: str
) -> dict[str, str]:
    return {key(one): one.reason for one in choose(wanted, device, shapes, measured)}


def key(choice: Choice) -> str:
    return choice.op if choice.direction == "both" else f"{choice.op} {choice.direction}"


def measured(times: Mapping[tuple[str, str], Mapping[str, float]], **changes: object) -> Measurements:
    """Times of parts at half the tokens of `SHAPES`."""
    half, fixed = replace(SHAPES, tokens=SHAPES.tokens // 2), {"dtype": "bf16", "skew": 0.0} | changes
    entries = tuple(
        OperatorTimes(op=op, direction=direction, shape=shape_of(op, half), microseconds=microseconds, **fixed)
        for (op, direction), microseconds in times.items()
    )
    return Measurements(device="NVIDIA H200", environment={}, entries=entries)


def test_every_operator_is_answered_once() -> None:
    choices = choose({}, H200, SHAPES, None)
    assert {one.op for one in choices} == FIELDS.keys() | {"attention", MASKED, "loss"}
    assert [one.direction for one in choices if one.op == "experts"] == list(PRODUCTS)
    assert len({key(one) for one in choices}) == len(choices)
    assert all(one.reason and not one.reason.endswith(".") for one in choices)


def test_a_gpu_without_measurements_takes_triton() -> None:
    b200 = named_device("B200", "bf16")
    found = chosen(b200)
    assert found.pop(MASKED) == "torch" and set(found.values()) == {"triton", "auto"}
    assert reasons(b200)["route"] == "no measurement for this chip: Triton by default"


def test_a_cpu_takes_torchs_forms_where_it_has_them_and_a_gpu_without_triton_too() -> None:
    found = chosen(CPU)
    products = {f"experts {product}" for product in PRODUCTS}
    assert {op for op, backend in found.items() if backend == "torch"} == {*products, "swiglu", "norm", "loss", "delta"}
    assert found["route"] == found["permute"] == found["rope"] == "reference"
    assert set(reasons(CPU).values()) == {"no GPU"}
    found = chosen(NO_TRITON)
    assert (found["experts forward"], found["route"], found["loss"]) == ("torch", "reference", "torch")
    assert reasons(NO_TRITON)["experts forward"] == "Triton is not installed"


def test_a_chip_without_launches_for_tritons_products_takes_torchs() -> None:
    a10 = replace(named_device("A100", "bf16"), name="NVIDIA A10", target="sm_86")
    assert a10.target not in GROUPED_GEMM
    assert {chosen(a10)[f"experts {product}"] for product in PRODUCTS} == {"torch"}
    assert reasons(a10)["experts forward"] == "no launches of Triton's products for bf16 on sm_86"
    assert chosen(a10)["norm"] == "triton"


def test_float32_products_on_a_gpu_take_the_reference() -> None:
    fp32 = replace(H200, dtype="fp32")
    assert chosen(fp32)["experts forward"] == "reference"
    assert chosen(fp32)["norm"] == "triton"
    assert reasons(fp32)["experts forward"] == "no launches of Triton's products for fp32 on sm_90"
    promised = "float32: torch promises its grouped_mm in bfloat16 only on a GPU"
    assert obstacle("experts", "torch", fp32, SHAPES) == promised
    assert chosen(replace(fp32, packages=frozenset()))["experts forward"] == "reference"


@pytest.mark.parametrize("sizes", [{"hidden": 2050}, {"ffn": 1404}])  # 16 bytes are 8 bfloat16
def test_rows_that_cannot_be_copied_in_pieces_take_the_reference(sizes: dict[str, int]) -> None:
    shapes = replace(SHAPES, **sizes)
    assert chosen(shapes=shapes)["experts forward"] == "reference"
    width = next(iter(sizes.values()))
    assert f"rows of {width} numbers are no multiple of 16 bytes" in reasons(shapes=shapes)["experts forward"]
    assert chosen(shapes=shapes)["norm"] == "triton"
    assert chosen(CPU, replace(SHAPES, hidden=2052))["experts forward"] == "torch"  # 2052 float32 are whole pieces


def test_a_router_with_too_many_experts_takes_the_reference() -> None:
    assert obstacle("route", "triton", H200, replace(SHAPES, experts=1024)) is None
    assert obstacle("route", "triton", H200, replace(SHAPES, experts=160, expert_groups=8)) is None
    assert chosen(shapes=replace(SHAPES, experts=1025))["route"] == "reference"
    assert chosen(shapes=replace(SHAPES, experts=9 * 65, expert_groups=9))["route"] == "reference"


def test_a_dense_model_has_no_experts_to_choose_for() -> None:
    found = reasons(shapes=DENSE)
    assert found["route"] == found["permute"] == found["experts forward"] == "the model has none"
    assert found["norm"] != "the model has none"
    assert reasons(shapes=replace(SHAPES, dense_ffn=0))["swiglu"] == "the model has none"


def test_an_operator_that_the_model_lacks_is_no_obstacle_to_one_backend_for_all() -> None:
    float32, plain = named_device("H200", "fp32"), replace(SHAPES, index_heads=0)
    assert chosen(float32, plain, all="triton")["sparse"] == "reference"
    assert chosen(float32, plain, all="triton")["norm"] == "triton"
    assert set(chosen(float32, replace(DENSE, index_heads=0), all="torch").values()) >= {"torch", "reference"}
    for shapes, backend in ((SHAPES, "triton"), (plain, "torch")):  # sparse attention, products of experts
        with pytest.raises(KernelError, match=f"kernels.all={backend} cannot be had"):
            choose({"all": backend}, float32, shapes, None)


def test_named_backends_are_taken_products_follow_experts_and_experts_follow_all() -> None:
    found = chosen(norm="torch", rope="reference", experts_weight_gradient="reference")
    assert (found["norm"], found["rope"], found["swiglu"]) == ("torch", "reference", "triton")
    assert [found[f"experts {product}"] for product in PRODUCTS] == ["triton", "triton", "reference"]
    assert reasons(norm="torch")["norm"] == "kernels.norm=torch"
    found = chosen(all="reference", experts="torch", experts_forward="triton")
    assert [found[f"experts {product}"] for product in PRODUCTS] == ["triton", "torch", "torch"]
    assert (found["norm"], found["route"], found["attention"]) == ("reference", "reference", "default")
    found = chosen(all="torch")
    assert (found["experts forward"], found["norm"], found["route"]) == ("torch", "torch", "reference")
    assert reasons(all="torch")["route"] == "kernels.all=torch, which has no route of its own"


REFUSED = (
    (CPU, {"norm": "triton"}, "norm=triton cannot be had for norm; got no GPU; allowed: auto, torch, reference"),
    (NO_TRITON, {"all": "triton"}, "all=triton cannot be had for route; got Triton is not installed; allowed: auto,"),
    (replace(H200, dtype="fp32"), {"experts": "torch"}, "got float32: torch promises its grouped_mm in bfloat16 only"),
    (replace(H200, dtype="fp32"), {"attention": "cudnn"}, "attention=cudnn cannot run on a GPU; got float32"),
    (replace(H200, dtype="fp32"), {"attention": "flash"}, "attention=flash cannot run on a GPU; got float32"),
    (NO_TRITON, {"experts_forward": "reference"}, "the experts' products can only be mixed where Triton is installed"),
)


@pytest.mark.parametrize(("device", "wanted", "message"), REFUSED)
def test_a_named_backend_that_cannot_run_is_refused_in_one_line(
    device: DeviceFacts, wanted: dict[str, str], message: str
) -> None:
    with pytest.raises(KernelError, match=message) as raised:
        choose(wanted, device, SHAPES, None)
    assert "fix: " in str(raised.value) and "\n" not in str(raised.value)


def test_the_backend_with_the_lowest_sum_over_the_parts_is_taken_if_it_can_run() -> None:
    times = measured(
        {("swiglu", "forward"): {"torch": 5, "triton": 1}, ("swiglu", "backward"): {"torch": 1, "triton": 8}}
    )
    assert chosen(measured=times)["swiglu"] == "torch"
    assert reasons(measured=times)["swiglu"] == "measured 1.50x faster than triton on NVIDIA H200 at 4096 tokens"
    assert chosen(NO_TRITON, measured=times)["swiglu"] == "torch"
    assert "the only one measured" in reasons(NO_TRITON, measured=times)["swiglu"]


def test_each_product_is_decided_by_its_own_times() -> None:
    fast, slow = {"torch": 1.0, "triton": 2.0, "reference": 9.0}, {"torch": 2.1, "triton": 2.0, "reference": 9.0}
    times = {(op, product): slow for op in ("gate_up", "down") for product in PRODUCTS}
    times[("down", "weight_gradient")] = times[("gate_up", "weight_gradient")] = fast  # torch is faster here only
    found = measured(times)
    assert [chosen(measured=found)[f"experts {product}"] for product in PRODUCTS] == ["triton", "triton", "torch"]
    where = "on NVIDIA H200 at 64 experts x 384 rows"
    assert reasons(measured=found)["experts forward"] == f"measured 1.05x faster than torch {where}"


def test_balanced_and_skewed_loads_count_the_same() -> None:
    even = measured({("down", "forward"): {"torch": 1, "triton": 2}, ("gate_up", "forward"): {"torch": 1, "triton": 2}})
    uneven = measured(
        {("down", "forward"): {"torch": 9, "triton": 2}, ("gate_up", "forward"): {"torch": 9, "triton": 2}}, skew=0.6
    )
    assert chosen(measured=even)["experts forward"] == "torch"
    assert chosen(measured=replace(even, entries=even.entries + uneven.entries))["experts forward"] == "triton"


def test_partial_measurements_and_those_in_another_dtype_decide_nothing() -> None:
    half = measured({("swiglu", "forward"): {"torch": 1, "triton": 5}})
    assert chosen(measured=half)["swiglu"] == "triton"
    assert reasons(measured=half)["swiglu"] == "not measured in bf16: Triton by default"
    times = {("swiglu", "forward"): {"torch": 1, "triton": 5}, ("swiglu", "backward"): {"torch": 1, "triton": 5}}
    assert chosen(measured=measured(times, dtype="fp32"))["swiglu"] == "triton"


def test_attention_is_ordered_by_vendor_and_wish() -> None:
    on_amd = next(one for one in choose({}, named_device("MI300X", "bf16"), SHAPES, None) if one.op == "attention")
    assert (on_amd.backend, shown(on_amd)) == ("auto", "flash first")
    assert chosen(all="triton")["attention"] == "auto"
    assert chosen(all="reference", attention="flash")["attention"] == "flash"


def test_the_summary_is_one_line() -> None:
    assert summary(choose({}, H200, SHAPES, None)) == (
        "triton: route, permute, experts, swiglu, norm, rope, delta, sparse, masked attention, loss; "
        "cuDNN first: attention"
    )
    assert summary(choose({"all": "reference"}, CPU, SHAPES, None)).endswith("; torch: attention, loss")
    mixed = summary(choose({"experts_forward": "torch"}, H200, SHAPES, None))
    assert "torch: experts" in mixed and "permute, experts" in mixed
    assert "route" not in summary(choose({}, H200, DENSE, None))


def test_operators_are_those_of_the_chosen_backends() -> None:
    found = operators(choose({"rope": "reference", "norm": "torch", "all": "reference"}, CPU, SHAPES, None))
    assert found.rms_norm is TORCH.rms_norm
    assert found.add_rms_norm is TORCH.add_rms_norm
    norms = {field: vars(TORCH)[field] for field in FIELDS["norm"]}
    assert found == replace(REFERENCE, **norms, attention_backend="default")
    assert operators(choose({"all": "reference", "attention": "math"}, CPU, SHAPES, None)).attention_backend == "math"


def test_triton_everywhere_is_tritons_own_set() -> None:
    assert operators(choose({}, H200, SHAPES, None)) == BACKENDS["triton"].operators


@pytest.mark.parametrize(
    "products", [("triton", "torch", "reference"), ("reference", "torch", "torch"), ("torch",) * 3], ids=" ".join
)
def test_mixed_products_give_the_gradients_of_the_definition(products: tuple[str, ...], device: torch.device) -> None:
    ffn = backends.experts_of(dict(zip(PRODUCTS, products, strict=True)))["expert_ffn"]
    batch = draw_batch(torch.rand(12, 4).topk(2).indices, 4, 16, 16, device)

    def run(network: object) -> list[torch.Tensor]:
        given = batch.x_TD, batch.gate_up_eFD, batch.down_eDF, batch.weights_R
        leaves = [one.detach().clone().requires_grad_() for one in given]
        y_RD = network(*leaves[:3], batch.order.counts_E, leaves[3], batch.index_R, places_TK=batch.order.places_TK)
        y_RD.float().square().sum().backward()
        return [y_RD.detach(), *(leaf.grad for leaf in leaves)]

    for found, expected in zip(run(ffn), run(REFERENCE.expert_ffn), strict=True):
        assert_close(found, expected, by="norm", tolerance=0.05 if device.type == "cuda" else 1e-4)


def test_every_operator_has_a_reference_and_every_backend_can_be_loaded() -> None:
    assert all(backend.ops and set(backend.ops) <= FIELDS.keys() for backend in BACKENDS.values())
    assert set(BACKENDS["reference"].ops) == FIELDS.keys()
    ours = vars(BACKENDS["triton"].operators)
    for field in (field for fields in FIELDS.values() for field in fields):
        assert ours[field] is not vars(REFERENCE)[field], f"{field} is left to its definition"


def test_the_knobs_offer_the_backends_of_their_operator() -> None:
    fields = Kernels.model_fields
    for point in CHOICE_POINTS:
        offered = {"auto", *(name for name, backend in BACKENDS.items() if point.op in backend.ops)}
        for knob in point.knobs:
            assert set(get_args(fields[knob].annotation)) == offered, knob
    assert set(get_args(fields["all"].annotation)) == {"auto", *BACKENDS}
    knobs = {knob for point in CHOICE_POINTS for knob in point.knobs}
    assert fields.keys() == knobs | {"all", "attention", "float8", "loss_chunk", "measured"}


def test_every_part_has_sizes_and_belongs_to_a_choice_point() -> None:
    assert {part.op for point in CHOICE_POINTS for part in point.parts} == PART_SIZES.keys()
    assert has("mla_heads", SHAPES)
    assert not has("rotate", SHAPES)
    assert not has("route", DENSE)


def test_the_facts_of_a_present_device() -> None:
    facts = device_facts(torch.device("cpu"), "fp32")
    assert (facts.kind, facts.name, facts.target) == ("cpu", "CPU", "interpreter")
    assert facts.has_triton == ("triton" in installed())
    assert installed(["torch", "no_such_package"]) == {"torch"}


def test_a_device_is_known_by_its_name_or_a_part_of_it() -> None:
    assert named_device("h200", "bf16").name == "NVIDIA H200"
    assert named_device("NVIDIA H200 NVL", "bf16").name == "NVIDIA H200 NVL"
    assert named_device("gb200", "bf16").name == "NVIDIA GB200"
    assert {named_device(chip.name, "bf16").target for chip in chips()} >= set(GROUPED_GEMM)
    says = "no device is known by this name; got 'Hopper'; allowed: auto, cpu, cuda, or"
    with pytest.raises(DeviceError, match=says):
        named_device("Hopper", "bf16")
