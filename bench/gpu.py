"""`python -m bench.gpu`: every kernel and whole steps of an 8B-shaped Llama on one GPU: right, and how near the limit.

Checks each kernel against its reference, measures the device's own limits (copy bandwidth, a large matrix product),
then times kernels and steps and prints each with its ratio to the limit and the target where one is set. Takes under
eight minutes; parts run in processes of their own, so that one that breaks the device's state spoils no other. The
figures go to bench/results/gpu-CARD.json with date, card, driver and versions. Needs torch, triton and this repository.

Exit status: 0 all right; 1 a kernel is wrong or a part failed; 3 there is no GPU. A missed target is shown and changes
nothing. `--cpu-check` tries the same code on tiny shapes in Triton's interpreter, on a machine without a GPU. `--sweep`
instead times launch configurations of attention and writes the best as candidates for the stored table.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

NO_GPU = 3
BUDGET_S = 400.0
PARTS = ("checks", "attention", "layers", "steps")
RESULTS = Path(__file__).parent / "results"
ROOT = Path(__file__).resolve().parent.parent


def run_part(part: str, device_name: str, deadline_s: float) -> dict[str, Any]:
    """Rows, limits and what the device is; what fails is a row with an error."""
    import torch

    from bench.gpu_kernels import TINY, Shape, attention_cases, layer_cases
    from bench.gpu_measure import Timer, measure_limits
    from bench.gpu_model import step_cases

    device = torch.device(device_name)
    torch.set_grad_enabled(False)
    if part == "checks":
        return {"rows": list(_checked(device, deadline_s))}
    timer = Timer(device)
    limits = measure_limits(timer)
    shape = Shape() if device.type == "cuda" else TINY
    if part == "sweep":
        from bench.gpu_sweep import sweep

        return {"limits": asdict(limits), "candidates": sweep(timer, limits, shape, deadline_s)}
    cases = {"attention": attention_cases, "layers": layer_cases, "steps": step_cases}[part]
    return {"limits": asdict(limits), "rows": list(_timed(cases(timer, limits, shape), deadline_s))}


def _checked(device: Any, deadline_s: float) -> Iterator[dict[str, Any]]:
    from bench.gpu_checks import CHECKS, TOLERANCE
    from bench.gpu_model import MODEL_TOLERANCE, check_model

    checks = {name: (check, TOLERANCE) for name, check in CHECKS.items()} | {"decoder": (check_model, MODEL_TOLERANCE)}
    for name, (check, tolerance) in checks.items():
        if time.monotonic() > deadline_s:
            yield {"name": f"check {name}", "error": "no time left"}
            continue
        try:
            worst = check(device)
            error = "" if worst <= tolerance else f"differs from the reference by {worst:.3g}"
            yield {"name": f"check {name}", "figure": f"error {worst:.1e}", "error": error}
        except Exception as failure:  # one kernel that cannot run leaves the others to be seen
            yield {"name": f"check {name}", "error": _line(failure)}


def _timed(cases: Iterator[tuple[str, Callable[[], Any]]], deadline_s: float) -> Iterator[dict[str, Any]]:
    for name, case in cases:
        if time.monotonic() > deadline_s:
            yield {"name": name, "error": "no time left"}
            continue
        try:
            row = case()
            yield {**asdict(row), "meets": row.meets}
        except Exception as failure:  # as above
            yield {"name": name, "error": _line(failure)}


def _line(failure: Exception) -> str:
    return f"{type(failure).__name__}: {failure}".splitlines()[0][:200]


def describe_device() -> dict[str, str]:
    """Card, driver and versions. Raises LookupError where there is no GPU."""
    import torch

    if not torch.cuda.is_available():
        raise LookupError(f"torch {torch.__version__} sees no GPU")
    import triton

    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        driver = subprocess.run(query, capture_output=True, text=True, check=True, timeout=30).stdout.split()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        driver = "unknown"
    return {
        "card": torch.cuda.get_device_name(),
        "driver": driver,
        "cuda": str(torch.version.cuda),
        "torch": torch.__version__,
        "triton": triton.__version__,
    }


def in_own_process(part: str, device: str, seconds: float) -> dict[str, Any]:
    """The result of a part, or a row that says why there is none."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "part.json"
        command = [sys.executable, "-m", "bench.gpu", "--part", part, "--device", device, "--out", str(out)]
        environment = {**os.environ, "TRITON_INTERPRET": "0" if device == "cuda" else "1"}
        environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        try:
            ended = subprocess.run(
                [*command, "--budget-s", str(seconds)], cwd=ROOT, env=environment, timeout=seconds + 60, check=False
            )
        except subprocess.TimeoutExpired:
            return {"rows": [{"name": part, "error": "did not end in its time"}]}
        if ended.returncode or not out.exists():
            return {"rows": [{"name": part, "error": f"ended with status {ended.returncode}"}]}
        found: dict[str, Any] = json.loads(out.read_text())
        return found


def show(row: dict[str, Any]) -> str:
    """A line of the table."""
    if row.get("error"):
        return f"{row['name']:34} FAILED  {row['error']}"
    line = f"{row['name']:34}"
    if row.get("milliseconds"):
        line += f"{row['milliseconds']:10.3f} ms"
    line += f"  {row.get('figure', ''):>16}"
    if row.get("limit"):
        line += f"  {row['ratio']:5.2f} of {row['limit']}"
    if row.get("target"):
        line += f" (target {'<=' if row['at_most'] else '>='} {row['target']}{'' if row['meets'] else ', MISSED'})"
    return line


def run_all(device: str, budget_s: float, parts: Sequence[str]) -> dict[str, Any]:
    """Every part after the other; prints as it goes."""
    end_s = time.monotonic() + budget_s
    result: dict[str, Any] = {"rows": []}
    for part in parts:
        found = in_own_process(part, device, max(10.0, end_s - time.monotonic()))
        if "limits" in found and "limits" not in result:
            result["limits"] = found["limits"]
            copy, matmul = found["limits"]["copy_bytes_per_s"], found["limits"]["matmul_flop_per_s"]
            print(f"limits: copy {copy / 1e9:.0f} GB/s, BF16 product {matmul / 1e12:.0f} TFLOP/s", flush=True)
        for row in found.get("rows", []):
            print(show(row), flush=True)
        result["rows"] += found.get("rows", [])
        result.update({key: value for key, value in found.items() if key == "candidates"})
    return result


def main() -> int:
    """Parse flags, run, print, write; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cpu-check", action="store_true", help="try the same code on tiny shapes without a GPU")
    parser.add_argument("--sweep", action="store_true", help="time launch configurations instead")
    parser.add_argument("--budget-s", type=float, default=BUDGET_S, help="what is not begun by then is left out")
    parser.add_argument("--part", choices=(*PARTS, "sweep"), help="run one part in this process (used by itself)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda", help="with --part")
    parser.add_argument("--out", type=Path, help="where the result goes; default: bench/results/gpu-CARD.json")
    arguments = parser.parse_args()
    if arguments.part:
        found = run_part(arguments.part, arguments.device, time.monotonic() + arguments.budget_s)
        arguments.out.write_text(json.dumps(found))
        return 0
    device = "cpu" if arguments.cpu_check else "cuda"
    result: dict[str, Any] = {"date": datetime.date.today().isoformat()}
    if arguments.cpu_check:
        result["card"] = "none: interpreted on CPU, times mean nothing"
    else:
        try:
            result |= describe_device()
        except (LookupError, ImportError) as missing:
            print(f"bench.gpu: no GPU here ({missing}); nothing was measured", file=sys.stderr)
            return NO_GPU
    print(", ".join(f"{key} {value}" for key, value in result.items()), flush=True)
    result |= run_all(device, arguments.budget_s, ("sweep",) if arguments.sweep else PARTS)
    out = arguments.out or RESULTS / f"gpu{'-sweep' if arguments.sweep else ''}-{_slug(result['card'])}.json"
    if not arguments.cpu_check or arguments.out:
        out.write_text(json.dumps(result, indent=1) + "\n")
        print(f"written to {out}")
    return 1 if any(row.get("error") for row in result["rows"]) else 0


def _slug(card: str) -> str:
    return "-".join("".join(c if c.isalnum() else " " for c in card.lower()).split())


if __name__ == "__main__":
    sys.exit(main())
