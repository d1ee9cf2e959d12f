"""The documentation names every setting, and its links lead to something."""

import re
from pathlib import Path

import pytest

from services.common.settings import ServiceSettings
from services.gateway.config import GatewaySettings
from services.kvstore.config import KvStoreSettings
from services.router.config import RouterSettings
from services.worker.config import WorkerSettings
from services.worker.mover.config import MoverSettings

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
LINK = re.compile(r"\]\((?!https?:)([^)\s#]*)(?:#([^)\s]*))?\)")


@pytest.mark.parametrize("settings", [GatewaySettings, KvStoreSettings, MoverSettings, RouterSettings, WorkerSettings])
def test_every_setting_is_documented(settings: type[ServiceSettings]) -> None:
    words = set(re.findall(r"\w+", " ".join(page.read_text().replace("-", "_") for page in PAGES)))
    assert set(settings.model_fields) - words == set()


def test_links_lead_to_pages_and_headings() -> None:
    assert [
        f"{page.name}: {target}#{anchor}"
        for page in PAGES
        for target, anchor in LINK.findall(page.read_text())
        if not _exists(page.parent / target if target else page, anchor)
    ] == []


def _exists(target: Path, anchor: str) -> bool:
    return target.exists() and (
        not anchor or anchor in map(_anchor, re.findall(r"^#+ (.*)$", target.read_text(), re.M))
    )


def _anchor(heading: str) -> str:
    """As GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
