"""The examples for autoscalers are well-formed and name metrics that routers have."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from services.router.pool_metrics import GAUGES

FOLDER = Path(__file__).parents[2] / "deploy" / "autoscale"
FILES = sorted(FOLDER.glob("*.yaml"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_every_metric_named_is_a_gauge_of_the_router(path: Path) -> None:
    named = set(re.findall(r"\bkvmesh_\w+", path.read_text()))
    assert named
    assert named <= set(GAUGES)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_files_are_yaml(path: Path) -> None:
    assert isinstance(yaml.safe_load(path.read_text()), dict)


def test_examples_scale_the_same_target_to_the_number_wanted() -> None:
    keda = yaml.safe_load((FOLDER / "keda.yaml").read_text())["spec"]
    hpa = yaml.safe_load((FOLDER / "hpa.yaml").read_text())["spec"]
    assert keda["scaleTargetRef"] == hpa["scaleTargetRef"]
    # A value of n at a target of 1 for each replica makes n replicas.
    (trigger,) = keda["triggers"]
    assert (trigger["metricType"], trigger["metadata"]["threshold"]) == ("AverageValue", "1")
    (metric,) = hpa["metrics"]
    assert metric["external"]["target"] == {"type": "AverageValue", "averageValue": "1"}
