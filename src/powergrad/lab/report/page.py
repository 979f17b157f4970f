"""The HTML page around the data: one file, whose policy forbids all requests."""

from __future__ import annotations

import base64
import hashlib
import html
import json
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from importlib import resources
from typing import Any

import yaml

from powergrad._version import __version__
from powergrad.lab.files import json_safe

FORMAT = 1  # of the data
SCRIPTS = ("elements", "terms", "charts", "study", "filters", "alpha", "page")
LIVE = "; connect-src 'self'"


def make_data(studies: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The data of the page, which its script shows."""
    defaults = {"words": [], "alone": False}
    return {
        "format": FORMAT,
        "version": __version__,
        "made": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "studies": list(studies),
        "glossary": [{**defaults, **term} for term in yaml.safe_load(_asset("glossary.yaml"))],
    }


def make_page(data: Mapping[str, Any]) -> str:
    """The page; with the key ``live`` in `data`, it keeps itself up to date."""
    is_live = "live" in data
    scripts = (*SCRIPTS[:-1], "live", SCRIPTS[-1]) if is_live else SCRIPTS
    style, script = _asset("page.css"), "".join(_asset(f"{name}.js") for name in scripts)
    policy = f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'; "
    policy += f"img-src data:; base-uri 'none'; form-action 'none'{LIVE if is_live else ''}"
    return _asset("page.html").format(
        policy=policy,
        version=html.escape(data["version"]),
        title=html.escape(" · ".join(study["title"] for study in data["studies"])),
        style=style,
        without_script=_without_script(data),
        data=as_json(data),
        script=script,
    )


def as_json(value: Any) -> str:
    """`value` as JSON for a script element; NaN and infinity become null."""
    text = json.dumps(json_safe(value), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    # An HTML parser ends the element at `</script`; old JavaScript rejects the line separators.
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _asset(name: str) -> str:
    return resources.files("powergrad.lab.report").joinpath(name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    """The hash by which a content security policy allows a script or style."""
    digest = hashlib.sha256(text.encode()).digest()
    return f"sha256-{base64.b64encode(digest).decode()}"


def _without_script(data: Mapping[str, Any]) -> str:
    """The text for readers without scripts, such as in the preview of an email."""
    lines = []
    for study in data["studies"]:
        lines.append(f'<h1 dir="auto">{html.escape(study["title"])}</h1>')
        sentences = [comparison["sentence"] for comparison in study["comparisons"]]
        notes = [study["tuned"], *study["notes"], *study["advice"]]
        texts = [study["provisional"], study["headline"], *sentences, *notes]
        lines += [f'<p dir="auto">{html.escape(text)}</p>' for text in texts if text]
    lines.append("<p>The script of this page draws curves, tables and figures.</p>")
    return "\n".join(lines)
