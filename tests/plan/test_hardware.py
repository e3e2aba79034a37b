"""Hardware is data: every packaged file is whole and sourced, a wrong file is refused in one line."""

import json
import re
import tomllib
from collections import Counter
from pathlib import Path

import pytest
import tomli_w

from penstock.base.devices import PACKAGED, chip_named, peak_flops
from penstock.base.errors import HardwareError
from penstock.cli.plan_print import cluster_text
from penstock.config.load import load_run
from penstock.kernels.tuning import named_device
from penstock.models.kernels import kernel_choices
from penstock.plan.assumptions import device_of
from penstock.plan.hardware import ORIGINS, POINTS, RankGroup, SourcedTable, TransferPoint, group_of
from penstock.plan.hardware_file import (
    hardware_text,
    known_hardware,
    load_hardware,
    parse_cluster,
    read_hardware,
    with_network,
    write_hardware,
)

KNOWN = known_hardware()


def changed(tmp_path: Path, **changes: object) -> Path:
    """The H200's file with tables replaced or, where None, left out."""
    tree = tomllib.loads((PACKAGED / "h200.toml").read_text()) | changes
    path = tmp_path / "mine.toml"
    path.write_text(tomli_w.dumps({key: value for key, value in tree.items() if value is not None}))
    return path


def table(name: str, **changes: object) -> dict[str, object]:
    """A table of the H200's file with values replaced or, where None, left out."""
    whole = tomllib.loads((PACKAGED / "h200.toml").read_text())[name] | changes
    return {key: value for key, value in whole.items() if value is not None}


def refusal(path: Path) -> str:
    with pytest.raises(HardwareError) as raised:
        read_hardware(path)
    assert "\n" not in str(raised.value)
    return str(raised.value)


@pytest.mark.parametrize("name", KNOWN)
def test_a_packaged_file_is_named_as_its_chip_and_known_by_the_name_of_its_driver(name: str) -> None:
    hardware = load_hardware(name)
    assert hardware.name == name
    chip = chip_named(hardware.driver)
    assert chip is not None and chip.pattern == name
    assert hardware.peaks.bf16 == peak_flops(hardware.driver)
    both = {"all-to-all", "all-gather", "reduce-scatter", "point-to-point", "deep-ep"}
    expected = {(kind, reach) for kind in both for reach in ("node", "cluster")} | {("symmetric", "node")}
    assert {(one.kind, one.reach) for one in hardware.collectives} == expected


@pytest.mark.parametrize("name", KNOWN)
def test_measured_rates_are_below_the_peak_and_memory_leaves_room(name: str) -> None:
    hardware = load_hardware(name)
    assert "host_link" in tomllib.loads((PACKAGED / f"{name.lower()}.toml").read_text())
    assert hardware.host_link.origin in ("datasheet", "assumed")
    assert hardware.host_link.bytes_per_second < hardware.peaks.memory_bytes_per_second / 10
    assert 0.9 * hardware.memory.capacity_bytes < hardware.usable_bytes < hardware.memory.capacity_bytes
    for measured in hardware.measured:
        assert {type(point) for point in measured.points} == {POINTS[measured.operator]}
        for point in measured.points:
            if not isinstance(point, TransferPoint):
                assert point.flops_per_second < hardware.peaks.flops_per_second(point.dtype)  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", [name for name in KNOWN if name != "H200"])
def test_no_figure_of_a_chip_without_measurements_is_called_measured(name: str) -> None:
    text = (PACKAGED / f"{name.lower()}.toml").read_text()
    assert not re.search(r'^source = "measured', text, re.MULTILINE)
    hardware = load_hardware(name)
    sourced = [one for one in vars(hardware).values() if isinstance(one, SourcedTable)]
    sources = [one.source for one in (*sourced, *hardware.collectives, *hardware.measured)]
    assert not [source for source in sources if source.startswith("measured")]


@pytest.mark.parametrize("name", KNOWN)
def test_no_chip_falls_silently_on_what_it_does_not_say(name: str) -> None:
    hardware = load_hardware(name)
    peaks, node = hardware.peaks, hardware.node
    assert None not in (peaks.fp32, peaks.power_watts, node.link_bytes_per_second, node.network_bytes_per_second)
    assert (peaks.fp8 is None) == (name == "A100")
    assert all(source.startswith("assumed: as on ") for source in {one.source for one in hardware.measured}) or (
        name == "H200"
    )
    run = load_run("deepseek-v2-lite", [])
    device = device_of(hardware, run)
    assert device.target == hardware.kernels == named_device(name, "bf16").target
    experts = [choice for choice in kernel_choices(run, device) if choice.op == "experts"]
    assert {choice.backend for choice in experts} == {"triton"}, "experts would run as a loop"


def test_chips_with_the_same_multiprocessors_take_the_measured_products_and_others_only_the_shares() -> None:
    h200, h100, h800 = map(load_hardware, ("H200", "H100", "H800"))
    products = [one for one in h200.measured if POINTS[one.operator] is not TransferPoint]
    assert [one.points for one in h100.measured] == [one.points for one in h800.measured]
    assert [one.points for one in h100.measured] == [one.points for one in products] != []
    assert load_hardware("H20").measured == load_hardware("B200").measured == ()
    assert load_hardware("H800").memory.source.startswith("assumed: as on H100 (reported: ")


def test_a_file_can_say_only_what_differs_from_a_chip_and_name_any_chip(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    rate = {
        "kind": "all-to-all",
        "reach": "cluster",
        "latency_seconds": 1e-4,
        "efficiency": 0.5,
        "source": "reported: us",
    }
    mine = {"name": "Ours", "like": "H200", "kernels": "sm_90", "collective": [rate]}
    path.write_text(tomli_w.dumps(mine))
    ours, h200 = read_hardware(path), load_hardware("H200")
    assert (ours.name, ours.kernels, ours.peaks.bf16, ours.node.devices) == ("Ours", "sm_90", 989e12, 8)
    assert ours.efficiency.source == f"assumed: as on H200 ({h200.efficiency.source})"
    assert len(ours.collectives) == len(h200.collectives)
    assert {one.efficiency for one in ours.collectives if (one.kind, one.reach) == ("all-to-all", "cluster")} == {0.5}
    assert device_of(ours, load_run("debug", [])).target == "sm_90"
    path.write_text(tomli_w.dumps(mine | {"like": "H900"}))
    assert "like is no other chip of the package; got 'H900'" in refusal(path)
    whole = changed(tmp_path, name="Ours", kernels=None)
    assert "the file has to say whose kernels it takes" in refusal(whole)
    assert "allowed: gfx942, gfx950, sm_100, sm_103, sm_80, sm_90" in refusal(
        changed(tmp_path, name="x", kernels="sm_7")
    )


def test_the_grouped_products_of_the_h200_are_those_of_the_result_file() -> None:
    rows = json.loads(Path("benchmarks/results/kernels-h200.json").read_text())["numbers"]["grouped_gemm"]["tflops"]
    for operator, product in (
        ("grouped_forward", "forward"),
        ("grouped_input_gradient", "input gradient"),
        ("grouped_weight_gradient", "weight gradient"),
    ):
        every = [one for one in load_hardware("H200").measured if one.operator == operator]
        (measured,) = [one for one in every if one.source.endswith("kernels-h200.json")]
        expected = [row["ours"] for row in rows if row["product"] == product and row["balanced"]]
        found = [point.flops_per_second / 1e12 for point in measured.points]  # type: ignore[attr-defined]
        assert found == pytest.approx(expected, abs=0.051)


def test_a_chip_is_found_by_any_case_and_by_its_drivers_name_and_an_unknown_one_is_refused() -> None:
    assert sorted(KNOWN) == list(known_hardware())
    assert load_hardware("h200") == load_hardware("NVIDIA H200") == load_hardware("H200")
    assert load_hardware("NVIDIA GB200").name == "GB200"
    with pytest.raises(HardwareError, match="no hardware is called 'H300'; allowed: A100, .*; fix: did you mean"):
        load_hardware("H300")
    with pytest.raises(HardwareError, match=r"fix: describe it in a file: `penstock calibrate"):
        load_hardware("abacus")


@pytest.mark.parametrize(
    ("name", "chip"),
    [
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("A100-SXM4-40GB", "A100"),
        ("NVIDIA A100 80GB PCIe", "A100"),
        ("NVIDIA A100-SXM4-80GB MIG 3g.40gb", "A100"),
        ("GRID A100DX-80C", "A100"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H100 PCIe", "H100"),
        ("NVIDIA H100 NVL", "H100"),
        ("NVIDIA H100XM-80C", "H100"),
        ("NVIDIA H800", "H800"),
        ("NVIDIA H20", "H20"),
        ("NVIDIA H20-3e", "H20"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA H200 NVL", "H200"),
        ("NVIDIA H200X-141C", "H200"),
        ("NVIDIA B200", "B200"),
        ("NVIDIA GB200", "GB200"),
        ("NVIDIA B300 SXM6 AC", "B300"),
        ("NVIDIA GB300", "GB300"),
        ("AMD Instinct MI300X", "MI300X"),
        ("AMD Instinct MI300X OAM", "MI300X"),
        ("AMD_Instinct_MI300X_OAM", "MI300X"),
        ("AMD Instinct MI300X VF", "MI300X"),
        ("AMD Instinct MI325X", "MI325X"),
        ("AMD Instinct MI350X", "MI350X"),
        ("AMD Instinct MI355X", "MI355X"),
        ("NVIDIA GH200 480GB", None),
        ("NVIDIA GH200 144G HBM3e", None),
        ("AMD Instinct MI300A", None),
        ("NVIDIA A10", None),
    ],
)
def test_a_chip_is_known_by_each_name_that_drivers_give_it(name: str, chip: str | None) -> None:
    found = chip_named(name)
    assert (found and found.pattern) == chip


@pytest.mark.parametrize("name", ["H2000", "GH200", "B2000", "H100NVL"])
def test_a_name_that_only_holds_the_name_of_a_chip_is_refused(name: str) -> None:
    with pytest.raises(HardwareError, match=f"no hardware is called '{name}'; allowed: A100, .*; fix: did you mean"):
        parse_cluster(f"8x{name}")


def test_a_file_reads_back_as_what_was_written(tmp_path: Path) -> None:
    hardware = load_hardware("H200")
    write_hardware(tmp_path / "new" / "mine.toml", hardware, ["a comment"])
    assert load_hardware(str(tmp_path / "new" / "mine.toml")) == hardware
    assert (tmp_path / "new" / "mine.toml").read_text() == hardware_text(hardware, ["a comment"])


def test_an_error_in_a_file_is_one_line_with_its_place(tmp_path: Path) -> None:
    path = changed(tmp_path, memory=table("memory", capacity_byte=1))
    assert refusal(path) == (
        f"{path}: memory.capacity_byte is an unknown key; fix: did you mean memory.capacity_bytes?"
    )
    path = changed(tmp_path, peaks=table("peaks", bf16="fast"))
    assert refusal(path).startswith(f'{path}: peaks.bf16 has the wrong type; got "fast"; allowed: number >= 1 (FLOP/s)')
    assert "efficiency is missing" in refusal(changed(tmp_path, efficiency=None))
    assert "out of range; got 1.2" in refusal(changed(tmp_path, efficiency=table("efficiency", memory=1.2)))
    assert "unknown value" in refusal(changed(tmp_path, node=table("node", links="ring")))


@pytest.mark.parametrize("source", ["", "datasheet", "datasheet: ", "somewhere: a page", "I measured: it"])
def test_a_source_must_say_of_what_kind_it_is(tmp_path: Path, source: str) -> None:
    text = refusal(changed(tmp_path, memory=table("memory", source=source)))
    assert "memory.source does not say what kind of source it is" in text
    assert all(origin in text for origin in ORIGINS)


@pytest.mark.parametrize(
    ("measured", "fault"),
    [
        ({"source": "assumed: x", "points": []}, "measured 1: operator is missing"),
        ({"operator": "sum", "source": "assumed: x", "points": []}, "operator has an unknown value; got 'sum'"),
        ({"operator": "product", "source": "assumed: x", "points": 3}, "points is no list"),
        ({"operator": "product", "source": "assumed: x", "points": [], "by": 1}, "measured 1: by is an unknown key"),
        ({"operator": "product", "source": "x", "points": []}, "does not say what kind"),
        (
            {"operator": "product", "source": "assumed: x", "points": [{"m": 1, "n": 1, "flops_per_second": 1e9}]},
            "measured 1, point 1: k is missing",
        ),
    ],
)
def test_a_wrong_measurement_is_refused(tmp_path: Path, measured: dict[str, object], fault: str) -> None:
    assert fault in refusal(changed(tmp_path, measured=[measured]))


def test_a_file_that_is_missing_or_no_toml_or_has_a_wrong_list_is_refused(tmp_path: Path) -> None:
    assert "there is no hardware file" in refusal(tmp_path / "gone.toml")
    (tmp_path / "bad.toml").write_text("name = ")
    assert "is not TOML" in refusal(tmp_path / "bad.toml")
    assert "collective is no list of tables" in refusal(changed(tmp_path, collective=3))
    one = tomllib.loads((PACKAGED / "h200.toml").read_text())["collective"][0]
    assert "collective 2: all-to-all in a node comes twice" in refusal(changed(tmp_path, collective=[one, one]))


def test_a_cluster_is_a_number_and_a_chip_or_a_file(tmp_path: Path) -> None:
    cluster = parse_cluster("768xMI300X")
    assert (cluster.devices, cluster.nodes, cluster.node_devices, cluster.hardware.name) == (768, 96, 8, "MI300X")
    assert parse_cluster(" 4 x h200 ").nodes == 1
    assert parse_cluster("4xH200").group(4) == RankGroup(4, 4), "a part of a node is a node"
    assert parse_cluster("144xGB200").nodes == 2
    assert parse_cluster(f"16x{changed(tmp_path, name='Ours', kernels='sm_90')}").hardware.name == "Ours"


@pytest.mark.parametrize(
    ("text", "nodes", "each"),
    [("256xGB200", 4, 64), ("64xGB200", 1, 64), ("100xGB200", 2, 50), ("1000xH100", 125, 8), ("12xH100", 2, 6)],
)
def test_nodes_may_be_used_in_part_if_all_have_as_many_devices(text: str, nodes: int, each: int) -> None:
    cluster = parse_cluster(text)
    assert (cluster.nodes, cluster.node_devices) == (nodes, each)
    assert cluster.group(2 * each) == RankGroup(2 * each, each)
    whole = cluster.hardware.node.devices
    assert (f"({nodes} nodes of {whole}, {each} used of each)" in cluster_text(cluster)) == (each < whole and nodes > 1)


def test_texts_that_are_no_cluster_and_devices_that_do_not_fill_their_nodes_are_refused() -> None:
    for text in ("", "MI300X", "768", "0xH200", "x8", "-8xH200", "8 H200"):
        with pytest.raises(HardwareError, match="a cluster is a number of devices"):
            parse_cluster(text)
    with pytest.raises(HardwareError, match=r"73 GB200 cannot be shared evenly .*; fix: say 72xGB200 or 144xGB200"):
        parse_cluster("73xGB200")


@pytest.mark.parametrize(
    ("ranks", "stride", "inside"),
    [(8, 1, 8), (16, 1, 8), (64, 1, 8), (2, 4, 2), (4, 4, 2), (16, 8, 1), (4, 64, 1), (1, 1, 1), (6, 2, 2), (6, 1, 2)],
)
def test_a_group_knows_how_many_of_its_ranks_share_a_node(ranks: int, stride: int, inside: int) -> None:
    assert parse_cluster("64xH200").group(ranks, stride) == RankGroup(ranks, inside)


@pytest.mark.parametrize("stride", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("ranks", [2, 3, 5, 6, 8, 10, 12, 20, 24])
def test_a_group_stands_for_the_one_with_the_smallest_part_in_a_node(ranks: int, stride: int) -> None:
    node, block = 8, ranks * stride
    parts = (
        Counter((first + inner + i * stride) // node for i in range(ranks))  # ranks of one group by their node
        for first in range(0, block * node, block)
        for inner in range(stride)
    )
    assert group_of(ranks, node, stride=stride).node_ranks == min(min(part.values()) for part in parts)


@pytest.mark.parametrize(
    ("ranks", "stride", "inside", "pod"),
    [(8, 1, 8, 0), (64, 1, 8, 32), (4, 8, 1, 0), (8, 8, 1, 4), (2, 64, 1, 1), (48, 1, 8, 16), (40, 1, 8, 8)],
)
def test_a_group_knows_how_many_of_its_ranks_share_a_pod(ranks: int, stride: int, inside: int, pod: int) -> None:
    cluster = with_network(parse_cluster("128xH200"), "pod_nodes=4,oversubscription=2")
    assert (cluster.pod_devices, cluster.group(ranks, stride)) == (32, RankGroup(ranks, inside, pod))
    assert with_network(cluster, "pod_nodes=16").pod_devices == 0, "all nodes are one pod"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("pods=4", r"the network has no such part; got 'pods=4'; allowed: pod_nodes=32, .*rails=true"),
        ("rails", "the network has no such part"),
        ("pod_nodes=0", "network: pod_nodes is out of range"),
        ("oversubscription=x", "network: oversubscription has the wrong type"),
        ("oversubscription=2", "oversubscription is between pods, and there are none; fix: say pod_nodes=N"),
    ],
)
def test_a_network_that_is_none_is_one_line(text: str, message: str) -> None:
    with pytest.raises(HardwareError, match=message):
        with_network(parse_cluster("128xH200"), text)


def test_a_file_without_a_link_has_the_usual_one(tmp_path: Path) -> None:
    old = read_hardware(changed(tmp_path, host_link=None))
    assert old.host_link.bytes_per_second == 50e9 and old.host_link.origin == "assumed"
    assert "[host_link]" in hardware_text(old)
