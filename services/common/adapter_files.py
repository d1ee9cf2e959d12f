"""A low-rank adapter as PEFT saves it: a folder with adapter_config.json and adapter_model.safetensors. No torch here.

What the forward pass does not do (DoRA, biases, whole modules, initialisations that change the base) is refused. An
adapter's identity is the digest of what is executed: its tensors and scaling, whatever the folder and files are called.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.common.artifacts.errors import InvalidArtifact
from services.common.artifacts.regular_file import open_regular, read_document
from services.common.artifacts.safetensors_header import StoredTensor, read_safetensors_header

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
PROJECTIONS = ("q", "k", "v", "o", "gate", "up", "down")
DIGEST_BYTES = 16
# Of any worker, whose own limit may be lower.
LARGEST_RANK = 256
MAX_WEIGHT_BYTES = 2 * 2**30
_DTYPES = ("F32", "F16", "BF16")
_MODULES = {
    **{name: f"self_attn.{name}_proj" for name in ("q", "k", "v", "o")},
    **{name: f"mlp.{name}_proj" for name in ("gate", "up", "down")},
}
_NAMES = {module: name for name, module in _MODULES.items()}
_TARGETS = tuple(f"{name}_proj" for name in PROJECTIONS)
_TENSOR = re.compile(
    r"base_model\.model\.(?:model\.)?layers\.([0-9]{1,4})\.([a-z_]+\.[a-z_]+)\.lora_([AB])(?:\.default)?\.weight"
)
# Fields that change what is computed; anything but these values of theirs is refused.
_PLAIN: Mapping[str, tuple[object, ...]] = {
    "use_dora": (None, False),
    "bias": (None, "none"),
    "lora_bias": (None, False),
    "modules_to_save": (None, []),
    "rank_pattern": (None, {}),
    "alpha_pattern": (None, {}),
    "fan_in_fan_out": (None, False),
    "layer_replication": (None, []),
    "target_parameters": (None, []),
    "trainable_token_indices": (None, [], {}),
    "alora_invocation_tokens": (None, []),
    "use_qalora": (None, False),
    "init_lora_weights": (None, True, False, "gaussian", "eva", "orthogonal"),
}
_LONGEST = 200


class InvalidAdapter(Exception):
    """The folder holds no adapter that can be executed; one line that says why."""

    def __init__(self, message: str) -> None:
        line = "".join(one if one.isprintable() else "?" for one in message)
        super().__init__(line if len(line) <= _LONGEST else f"{line[:_LONGEST]}...")


@dataclass(frozen=True, slots=True)
class AdapterTensor:
    """dtype: F32, F16 or BF16. data: row-major, little-endian."""

    dtype: str
    shape: tuple[int, int]
    data: memoryview


@dataclass(frozen=True, slots=True)
class AdaptedProjection:
    """One projection [n, k] of one layer. down: [rank, k]; up: [n, rank]."""

    layer: int
    name: str
    down: AdapterTensor
    up: AdapterTensor


@dataclass(frozen=True, slots=True)
class AdapterFiles:
    """A folder's adapter: scaling * up (down x) is added to the output of each projection. digest: 16 bytes."""

    rank: int
    scaling: float
    projections: tuple[AdaptedProjection, ...]
    digest: bytes


def read_adapter(folder: Path, *, max_rank: int = LARGEST_RANK, max_parameters: int | None = None) -> AdapterFiles:
    """Read and check a PEFT folder. max_parameters: of an adapter; a larger one is not read. Raises InvalidAdapter."""
    rank, scaling = _read_config(folder)
    if rank > max_rank:
        raise InvalidAdapter(f"r = {rank}: at most {max_rank} is served")
    projections = tuple(_projections(_read_tensors(folder, max_parameters), rank))
    return AdapterFiles(rank, scaling, projections, _digest(scaling, projections))


def _read_config(folder: Path) -> tuple[int, float]:
    """Rank and scaling."""
    try:
        config = json.loads(read_document(folder / CONFIG_FILE))
    except (OSError, ValueError, RecursionError) as error:
        raise InvalidAdapter(f"{CONFIG_FILE} cannot be read: {_reason(error)}") from None
    if not isinstance(config, dict) or config.get("peft_type", "LORA") != "LORA":
        raise InvalidAdapter(f"{CONFIG_FILE}: peft_type must be LORA")
    for field, plain in _PLAIN.items():
        if config.get(field) not in plain:
            raise InvalidAdapter(f"{CONFIG_FILE}: {field} = {str(config[field])[:60]!r} is not served")
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if type(rank) is not int or not 1 <= rank <= LARGEST_RANK:
        raise InvalidAdapter(f"{CONFIG_FILE}: r = {str(rank)[:20]}: must be 1 to {LARGEST_RANK}")
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not abs(alpha) <= 1e6:
        raise InvalidAdapter(f"{CONFIG_FILE}: lora_alpha = {str(alpha)[:20]}: must be a number")
    _check_targets(config.get("target_modules"))
    return rank, alpha / (math.sqrt(rank) if config.get("use_rslora") is True else rank)


def _check_targets(targets: Any) -> None:
    """A list is looked at; what a pattern means, the tensors say."""
    for target in targets if isinstance(targets, list) else ():
        if str(target).rpartition(".")[2] not in _TARGETS:
            known = ", ".join(_TARGETS)
            raise InvalidAdapter(f"{CONFIG_FILE}: target_modules has {str(target)[:60]!r}: only {known} can be adapted")


def _read_tensors(folder: Path, max_parameters: int | None) -> dict[str, AdapterTensor]:
    path = folder / WEIGHTS_FILE
    try:
        stored = read_safetensors_header(path)
        _check_size(sum(math.prod(tensor.shape) for tensor in stored), max_parameters)
        with open(open_regular(path), "rb") as file:
            data = memoryview(file.read(MAX_WEIGHT_BYTES + 1))
    except InvalidArtifact as error:
        raise InvalidAdapter(str(error)) from None
    except OSError as error:
        raise InvalidAdapter(f"{WEIGHTS_FILE} cannot be read: {_reason(error)}") from None
    if len(data) > MAX_WEIGHT_BYTES:
        raise InvalidAdapter(f"{WEIGHTS_FILE} has over {MAX_WEIGHT_BYTES} bytes")
    return {tensor.name: _tensor(tensor, data) for tensor in stored}


def _check_size(parameters: int, most: int | None) -> None:
    if most is not None and parameters > most:
        raise InvalidAdapter(f"it has {parameters} parameters: no more than {most} have room")


def _tensor(stored: StoredTensor, data: memoryview) -> AdapterTensor:
    if stored.dtype not in _DTYPES or len(stored.shape) != 2:
        shape = list(stored.shape)
        raise InvalidAdapter(
            f"tensor {stored.name} is {stored.dtype} {shape}: a matrix of {', '.join(_DTYPES)} is needed"
        )
    content = data[stored.offset : stored.offset + stored.size]
    if len(content) != stored.size:
        raise InvalidAdapter(f"{WEIGHTS_FILE} has changed while it was read")
    rows, columns = stored.shape
    return AdapterTensor(stored.dtype, (rows, columns), content)


def _projections(tensors: Mapping[str, AdapterTensor], rank: int) -> Iterable[AdaptedProjection]:
    """In the order of layers and names. Raises InvalidAdapter for what is no pair of matrices of this rank."""
    sides: dict[tuple[int, str], dict[str, AdapterTensor]] = {}
    for name, tensor in tensors.items():
        found = _TENSOR.fullmatch(name)
        if found is None or found[2] not in _NAMES:
            raise InvalidAdapter(f"tensor {name} has no place: only projections of attention and MLP can be adapted")
        pair = sides.setdefault((int(found[1]), _NAMES[found[2]]), {})
        if pair.setdefault(found[3], tensor) is not tensor:
            raise InvalidAdapter(f"tensor {name} is there under another name, too")
    if not sides:
        raise InvalidAdapter(f"{WEIGHTS_FILE} holds no tensors")
    for (layer, name), pair in sorted(sides.items()):
        what = f"{_MODULES[name]} of layer {layer}"
        if set(pair) != {"A", "B"}:
            raise InvalidAdapter(f"{what} has lora_{''.join(pair)} alone")
        if pair["A"].shape[0] != rank or pair["B"].shape[1] != rank:
            raise InvalidAdapter(f"{what} has shapes {pair['A'].shape} and {pair['B'].shape}, which r = {rank} is not")
        yield AdaptedProjection(layer, name, pair["A"], pair["B"])


def _digest(scaling: float, projections: Iterable[AdaptedProjection]) -> bytes:
    """Every part with its length before it, so that no two adapters hash the same text."""
    digest = hashlib.blake2b(scaling.hex().encode(), digest_size=DIGEST_BYTES, person=b"kvmesh lora 1")
    for one in projections:
        for side, tensor in (("A", one.down), ("B", one.up)):
            head = f"{one.layer} {one.name} {side} {tensor.dtype} {tensor.shape} {len(tensor.data)}".encode()
            digest.update(len(head).to_bytes(4, "little") + head)
            digest.update(tensor.data)
    return digest.digest()


def _reason(error: Exception) -> str:
    return error.strerror or str(error) if isinstance(error, OSError) else str(error)
