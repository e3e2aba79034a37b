"""Measurements: the nearest shape, the file that counts, and the error of a damaged file."""

import json
from pathlib import Path

import pytest

from penstock.base.errors import KernelError
from penstock.kernels.choose import PACKAGED, Measurements, OperatorTimes, find, load, save, slug, user_file

DEVICE = "NVIDIA H200"


def entry(
    tokens: int = 1024, skew: float = 0.0, torch: float = 2.0, triton: float = 1.0, op: str = "swiglu"
) -> OperatorTimes:
    return OperatorTimes(
        op=op,
        direction="forward",
        dtype="bf16",
        skew=skew,
        shape={"tokens": tokens, "dense_ffn": 512},
        microseconds={"torch": torch, "triton": triton},
    )


def measurements(*entries: OperatorTimes, device: str = DEVICE) -> Measurements:
    return Measurements(device=device, environment={"torch": "2.11.0", "triton": "3.6.0"}, entries=entries)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(Path, "home", lambda: tmp_path / "home")
    return tmp_path / "home"


def test_a_saved_file_is_loaded_unchanged_and_has_one_line_for_each_entry(tmp_path: Path) -> None:
    saved = measurements(entry(), entry(skew=0.6), entry(tokens=2048, triton=1.25))
    save(tmp_path / "deep" / "m.json", saved)
    assert load(tmp_path / "deep" / "m.json") == saved
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["m.json"]
    lines = (tmp_path / "deep" / "m.json").read_text().splitlines()
    assert [json.loads(line.rstrip(","))["skew"] for line in lines if '"op"' in line] == [0.0, 0.6, 0.0]


def test_nearest_is_by_ratio_and_gives_every_skew() -> None:
    known = measurements(entry(1000), entry(1000, skew=0.6), entry(4000))
    shape = {"tokens": 1900, "dense_ffn": 512}
    near = known.nearest("swiglu", "forward", "bf16", shape)
    assert [(one.shape["tokens"], one.skew) for one in near] == [(1000, 0.0), (1000, 0.6)]
    assert known.nearest("swiglu", "forward", "bf16", {**shape, "tokens": 2100})[0].shape["tokens"] == 4000


def test_operators_that_were_not_measured_have_no_nearest_entry() -> None:
    known, shape = measurements(entry()), {"tokens": 512, "dense_ffn": 512}
    for key in (("route", "forward", "bf16"), ("swiglu", "backward", "bf16"), ("swiglu", "forward", "fp32")):
        assert known.nearest(*key, shape) == ()
    assert known.nearest("swiglu", "forward", "bf16", {"tokens": 512, "hidden": 512}) == ()


def test_a_devices_name_becomes_a_file_name(home: Path) -> None:
    assert slug("AMD Instinct MI300X (OAM)") == "amd-instinct-mi300x-oam"
    assert user_file(DEVICE) == home / ".config/penstock/kernels/nvidia-h200.json"


def test_a_users_own_entries_come_before_the_packages_and_a_named_file_before_both(tmp_path: Path, home: Path) -> None:
    save(user_file(DEVICE), measurements(entry(1000, triton=5.0)))
    save(tmp_path / "nvidia-h200.json", measurements(entry(1000), entry(4000)))
    found = find(DEVICE, packaged=tmp_path)
    near = (found.nearest("swiglu", "forward", "bf16", {"tokens": tokens, "dense_ffn": 512}) for tokens in (1000, 4000))
    assert [one[0].microseconds["triton"] for one in near] == [5.0, 1.0]
    save(tmp_path / "mine.json", measurements(entry(1000, triton=7.0)))
    found = find(DEVICE, tmp_path / "mine.json", packaged=tmp_path / "none")
    assert [one.microseconds["triton"] for one in found.entries] == [7.0]


def test_an_unknown_device_and_a_user_without_a_home_have_no_measurements(
    tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    assert find("NVIDIA Nothing", packaged=tmp_path) is None
    monkeypatch.setattr(Path, "home", homeless)
    assert find(DEVICE, packaged=tmp_path) is None


def test_a_named_file_must_exist_and_be_about_the_device(tmp_path: Path) -> None:
    with pytest.raises(
        KernelError, match=r"mine.json cannot be read; got No such file or directory; fix: measure again"
    ):
        find(DEVICE, tmp_path / "mine.json", packaged=tmp_path)
    save(tmp_path / "mine.json", measurements(device="NVIDIA B200"))
    with pytest.raises(KernelError, match="another device; got NVIDIA B200; allowed: NVIDIA H200"):
        find(DEVICE, tmp_path / "mine.json", packaged=tmp_path)


GOOD = {"op": "a", "direction": "b", "dtype": "bf16", "skew": 0, "shape": {"tokens": 1}, "microseconds": {"torch": 1.0}}


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ('{"device": "NV', "Unterminated string"),
        ("\udcff", "codec can't decode"),
        ("[]", "dictionary"),
        ('{"device": 3, "environment": {}, "entries": []}', "device: Input should be a valid string"),
        ('{"device": "a", "environment": {}, "entries": {}}', "entries: Input should be a valid tuple"),
        *(
            (json.dumps({"device": "a", "environment": {}, "entries": [GOOD, {**GOOD, **wrong}]}), f"entries.1.{place}")
            for wrong, place in (
                ({"op": 1}, "op"),
                ({"more": 1}, "more"),
                ({"shape": {"tokens": 0}}, "shape.tokens"),
                ({"microseconds": {"torch": "fast"}}, "microseconds.torch"),
                ({"skew": ""}, "skew"),
            )
        ),
    ],
)
def test_a_damaged_file_is_one_clear_line(tmp_path: Path, text: str, fault: str) -> None:
    path = tmp_path / "m.json"
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(KernelError) as raised:
        load(path)
    message = str(raised.value)
    assert f"measurements {path} are damaged; got" in message
    assert fault in message
    assert message.endswith("fix: measure again with `penstock kernels tune`, or delete the file")
    assert "\n" not in message


def test_a_file_that_cannot_be_written_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(KernelError, match="measurements cannot be written to"):
        save(tmp_path / "file" / "m.json", measurements())


@pytest.mark.parametrize("path", sorted(PACKAGED.glob("*.json")), ids=lambda path: path.stem)
def test_a_packaged_file_is_about_the_device_that_it_is_named_for(path: Path) -> None:
    found = load(path)
    assert slug(found.device) == path.stem
    assert found.entries
    assert len({one.key for one in found.entries}) == len(found.entries)
