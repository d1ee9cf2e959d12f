"""Weights into memory: the right bytes in the right tensors, and no damaged artifact ever becomes a runner."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.common.artifacts.manifest import make_manifest, manifest_path, write_manifest
from services.common.artifacts.safetensors_header import ITEM_BYTES
from services.worker.model.errors import InvalidWeights
from services.worker.model.gguf_file import read_gguf
from services.worker.model.model_files import open_model
from services.worker.model.reading import Extent, WeightFile, read_weights
from services.worker.model.safetensors_source import DTYPES

from .conftest import loaded
from .test_hf_folder import save


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("original")
    save(folder, shard_size="60KB", tie_word_embeddings=False)
    assert len(list(folder.glob("*.safetensors"))) > 2
    return folder


@pytest.fixture
def folder(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "model"))


def load(path: Path) -> bytes:
    with loaded(path, "float32", num_blocks=2, context=32, compiled=False) as runner:
        return runner.spec.digest


@given(
    sizes=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 30)), max_size=12),
    chunk_bytes=st.integers(1, 64),
    threads=st.integers(1, 3),
)
def test_every_byte_goes_where_it_belongs(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[tuple[int, int]], chunk_bytes: int, threads: int
) -> None:
    """Tensors and gaps of any size against chunks of any size."""
    path = tmp_path_factory.mktemp("scatter") / "f"
    extents, position = [], 5
    for number, (size, gap) in enumerate(sizes):
        extents.append(Extent(str(number), position, size))
        position += size + gap
    data = np.random.default_rng(1).integers(0, 256, position, dtype=np.uint8).tobytes()
    path.write_bytes(data)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("services.common.artifacts.chunk_reader.CHUNK_BYTES", chunk_bytes)
        found = read_weights([WeightFile(path, tuple(extents))], threads=threads)
    for extent in extents:
        assert found.tensors[extent.name].numpy().tobytes() == data[extent.offset : extent.offset + extent.size]


def test_sealed_and_unsealed_are_the_same_model(folder: Path) -> None:
    before = load(folder)
    write_manifest(folder, make_manifest(folder))
    assert load(folder) == before


def shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def truncate(folder: Path) -> str:
    path = shards(folder)[1]
    path.write_bytes(path.read_bytes()[:-9])
    return path.name


def flip_tensor_bit(folder: Path) -> str:
    path = shards(folder)[0]
    data = bytearray(path.read_bytes())
    data[-1000] ^= 4
    path.write_bytes(data)
    return path.name


def flip_header_bit(folder: Path) -> str:
    path = shards(folder)[0]
    data = bytearray(path.read_bytes())
    data[20] ^= 1
    path.write_bytes(data)
    return path.name


def swap_shards(folder: Path) -> str:
    first, second = shards(folder)[:2]
    one, other = first.read_bytes(), second.read_bytes()
    first.write_bytes(other)
    second.write_bytes(one)
    return first.name


def remove_shard(folder: Path) -> str:
    shards(folder)[-1].unlink()
    return shards(folder)[-1].name[:6]


def change_config(folder: Path) -> str:
    path = folder / "config.json"
    path.write_text(path.read_text().replace("1e-06", "1e-05"))
    return path.name


def damage_manifest(folder: Path) -> str:
    path = manifest_path(folder)
    path.write_bytes(path.read_bytes()[:200])
    return path.name


def manifest_of_another_model(folder: Path) -> str:
    shutil.copy(folder / "config.json", folder / "other.json")
    other = make_manifest(folder)
    (folder / "other.json").unlink()
    write_manifest(folder, other)
    return "other.json"


DAMAGES = (
    *(truncate, flip_tensor_bit, flip_header_bit, swap_shards, remove_shard, change_config),
    *(damage_manifest, manifest_of_another_model),
)


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_sealed_artifact_that_differs_is_refused(folder: Path, damage: Callable[[Path], str]) -> None:
    write_manifest(folder, make_manifest(folder))
    named = damage(folder)
    with pytest.raises(InvalidWeights) as refused:
        load(folder)
    assert named in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("damage", [truncate, swap_shards, remove_shard])
def test_what_shows_without_a_manifest_is_refused_too(folder: Path, damage: Callable[[Path], str]) -> None:
    named = damage(folder)
    with pytest.raises(InvalidWeights, match=named):
        load(folder)


def test_without_a_manifest_a_flipped_bit_is_another_model(folder: Path) -> None:
    before = load(folder)
    flip_tensor_bit(folder)
    assert load(folder) != before


def write_gguf(path: Path) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("one", np.arange(64, dtype=np.float32))
    writer.add_tensor("two", np.arange(96, dtype=np.float32).reshape(3, 32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_gguf_tensors_in_memory(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf")
    file = read_gguf(path)
    extents = tuple(Extent(one.name, one.offset, one.data.nbytes) for one in file.tensors.values())
    found = read_weights([WeightFile(path, extents)])
    memory = file.in_memory({name: tensor.numpy() for name, tensor in found.tensors.items()})
    path.write_bytes(b"")
    assert memory.tensors["two"].dequantise().tolist() == np.arange(96.0).reshape(3, 32).tolist()


def test_a_gguf_tensor_beyond_the_end(tmp_path: Path) -> None:
    whole = write_gguf(tmp_path / "whole.gguf").read_bytes()
    path = tmp_path / "m.gguf"
    path.write_bytes(whole[: len(whole) - 33])
    with pytest.raises(InvalidWeights, match=r"^m\.gguf is not a readable GGUF file: tensor two ends at byte"):
        read_gguf(path)
    # A dimension so large that the product does not fit 64 bits.
    at = whole.index(b"two") + 3 + 4
    path.write_bytes(whole[:at] + (2**61).to_bytes(8, "little") + (2**61).to_bytes(8, "little") + whole[at + 16 :])
    with pytest.raises(InvalidWeights, match="tensor two ends at byte"):
        read_gguf(path)


def patched(tmp_path: Path, at: bytes, skip: int, value: bytes) -> Path:
    """The small file with bytes replaced, `skip` after the first occurrence of `at`."""
    data = bytearray(write_gguf(tmp_path / "whole.gguf").read_bytes())
    start = data.index(at) + skip
    data[start : start + len(value)] = value
    path = tmp_path / "m.gguf"
    path.write_bytes(data)
    return path


def test_gguf_headers_that_lie(tmp_path: Path) -> None:
    number = (1).to_bytes(4, "little")
    for at, skip, value, message in (
        (b"two", 3, (2**31).to_bytes(4, "little"), "two: 2147483648 dimensions"),
        (b"two", 3, bytes(4), "two: 0 dimensions"),
        (b"two", 3 + 4, bytes(8), "two holds no values"),
        (b"two", 3 + 4 + 16 + 4, bytes(8), "overlaps"),
        (b"two", 0, b"one", "one occurs twice"),
        (b"two", 3 + 4 + 16, (99).to_bytes(4, "little"), "99"),
        (b"GGUF", 8, (2**63).to_bytes(8, "little"), "not a readable"),
        (b"GGUF", 16, (2**63 + 5).to_bytes(8, "little"), "not a readable"),
        (b"general.architecture", -8, (2**64 - 1).to_bytes(8, "little"), "not a readable"),
        (b"general.architecture", 20, (9).to_bytes(4, "little") + number, "not a readable"),
    ):
        with pytest.raises(InvalidWeights, match=message) as refused:
            read_gguf(patched(tmp_path, at, skip, value))
        assert "\n" not in str(refused.value)


@settings(max_examples=300)
@given(position=st.integers(0, 220), bit=st.integers(0, 7), cut=st.integers(0, 900))
def test_any_damage_to_a_gguf_header_is_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, position: int, bit: int, cut: int
) -> None:
    folder = tmp_path_factory.mktemp("gguf")
    data = bytearray(write_gguf(folder / "whole.gguf").read_bytes())
    data[position % len(data)] ^= 1 << bit
    (folder / "m.gguf").write_bytes(data[: max(1, len(data) - cut)] if cut % 2 else data)
    try:
        file = read_gguf(folder / "m.gguf")
    except InvalidWeights:
        return
    assert all(0 < one.offset + one.data.nbytes <= len(data) for one in file.tensors.values())


def test_every_dtype_of_the_format_has_its_tensor_type() -> None:
    assert {name: dtype.itemsize for name, dtype in DTYPES.items()} == ITEM_BYTES


def test_a_sealed_gguf_is_verified(model_path: Path, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    shutil.copy(model_path, path)
    write_manifest(path, make_manifest(path))
    with path.open("r+b") as file:
        file.seek(-5000, 2)
        byte = file.read(1)[0]
        file.seek(-5000, 2)
        file.write(bytes([byte ^ 1]))
    with pytest.raises(InvalidWeights, match=r"m\.gguf: chunk \d+ .*differs"):
        open_model(path).read()


def test_memory_is_given_back_tensor_by_tensor(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(bytes(2000))
    found = read_weights([WeightFile(tmp_path / "f", (Extent("a", 0, 1000), Extent("b", 1000, 1000)))])
    storages = {tensor.untyped_storage().data_ptr() for tensor in found.tensors.values()}
    assert len(storages) == 2
    assert all(tensor.untyped_storage().nbytes() == 1000 for tensor in found.tensors.values())
    assert found.tensors["a"].dtype == torch.uint8
