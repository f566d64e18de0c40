"""The page in a real browser: Debian's Chromium, driven by Playwright. It is skipped where either is missing."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable, Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from diglot.attend import LARGEST, to_page
from diglot.config import AlignmentConfig
from diglot.subwords import word_spans
from diglot.translator import Attention

playwright = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed: pip install -e '.[dev]'")
expect = playwright.expect
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not CHROMIUM, reason="there is no Chromium: apt-get install chromium"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),  # Playwright's own, of its event loop
]

SCREENS = {"desktop": (1440, 900), "phone": (390, 844)}
PARTS = ("encoder", "decoder", "cross")
PAYLOADS = """
<script>PAYLOAD</script>
</script><script>PAYLOAD</script>
<img src=x onerror=PAYLOAD>
<svg onload=PAYLOAD>
"><img src=x onerror=PAYLOAD>
'><svg/onload=PAYLOAD>
<iframe srcdoc="<script>parent.PAYLOAD</script>">
<iframe src="javascript:PAYLOAD">
<a href="javascript:PAYLOAD">x</a>
<body onload=PAYLOAD>
<details open ontoggle=PAYLOAD>
<style>@import 'http://127.0.0.1:9/x'</style>
<link rel=stylesheet href=http://127.0.0.1:9/x>
<base href=http://127.0.0.1:9/>
<meta http-equiv=refresh content="0;url=javascript:PAYLOAD">
<form action=javascript:PAYLOAD><input autofocus onfocus=PAYLOAD>
<math><mi xlink:href="javascript:PAYLOAD">
<template><script>PAYLOAD</script></template>
<!--><script>PAYLOAD</script>-->
<![CDATA[<script>PAYLOAD</script>]]>
{{constructor.constructor('PAYLOAD')()}}
{{DATA}}{{SCRIPT}}
${PAYLOAD}
\\u003cscript\\u003ePAYLOAD\\u003c/script\\u003e
&lt;script&gt;PAYLOAD&lt;/script&gt;
";PAYLOAD;//
';PAYLOAD;//
*/PAYLOAD/*
__proto__
constructor
""".strip().split("\n")
CALLS = ["window.ran=1", "alert(1)", "document.title='ran'", "fetch('http://127.0.0.1:9/x')", "eval('window.ran=1')"]
HOSTILE = [payload.replace("PAYLOAD", call) for payload in PAYLOADS for call in CALLS]


def random_rows(rng: np.random.Generator, *shape: int, causal: bool = False) -> NDArray[Any]:
    """Weights that sum to one in each row, some sharp, some flat."""
    scores = rng.normal(size=shape) * rng.choice([0.3, 2.0, 6.0], size=(*shape[:-1], 1))
    if causal:
        scores = np.where(np.tril(np.ones(shape[-2:], bool)), scores, -np.inf)
    powers = np.exp(scores - scores.max(-1, keepdims=True))
    return powers / powers.sum(-1, keepdims=True)


def attention_of(src: str, tgt: str, layers: int = 2, heads: int = 3, seed: int = 1, sizes: Any = None) -> Attention:
    """Random attention between pieces that blanks separate."""
    rng = np.random.default_rng(seed)
    pieces = [(*text.split(), "</s>") for text in (src, tgt)]
    S, T = map(len, pieces)
    return Attention(
        pieces[0], pieces[1], tuple(word_spans(pieces[0][:-1])), tuple(word_spans(pieces[1][:-1])),
        random_rows(rng, layers, heads, S, S), random_rows(rng, layers, heads, T, T, causal=True),
        random_rows(rng, layers, heads, T, S), source=src.replace(" ", "").replace("▁", " ").strip(),
        text=tgt.replace(" ", "").replace("▁", " ").strip(), score=-0.5 * seed,
        src_attribution=rng.normal(size=(T, S)), tgt_attribution=rng.normal(size=(T, T)),
    )  # fmt: skip


TWO = [
    attention_of("▁the ▁twenty - first ▁of ▁March", "▁der ▁ein undzwanzig ste ▁März", seed=1),
    attention_of("▁the ▁twenty - first ▁of ▁March", "▁der ▁21 . ▁März", seed=2),
]
TWO[1] = dataclasses.replace(TWO[1], encoder=TWO[0].encoder)
ALIGNING = AlignmentConfig(2, (1, 3))


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        found = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield found
        found.close()


@pytest.fixture
def open_page(browser: Any, tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Open what to_page makes; at the end, nothing may have gone wrong in it, and it may have asked for nothing."""
    contexts: list[Any] = []
    wrong: list[str] = []

    def opened(html: str, screen: str = "desktop", dark: bool = False) -> Any:
        path = tmp_path / f"{len(contexts)}.html"
        path.write_text(html, encoding="utf-8")
        width, height = SCREENS[screen]
        context = browser.new_context(
            viewport={"width": width, "height": height}, color_scheme="dark" if dark else "light", offline=True
        )
        contexts.append(context)
        page = context.new_page()
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("console", lambda message: wrong.append(message.text))
        page.on("dialog", lambda dialog: (wrong.append(dialog.message), dialog.dismiss()))
        page.on("request", lambda request: wrong.append(request.url) if request.url != path.as_uri() else None)
        page.goto(path.as_uri())
        page.wait_for_selector("html[data-ready]", timeout=120_000)
        return page

    yield opened
    for context in contexts:
        context.close()
    assert not wrong


def cell_centre(page: Any, row: int, column: int, canvas: str = "#map") -> tuple[float, float]:
    box = page.locator(canvas).bounding_box()
    place = page.evaluate("shown.place")
    return (
        box["x"] + place["left"] + (column + 0.5) * place["cell"],
        box["y"] + place["above"] + (row + 0.5) * place["cell"],
    )


def test_the_numbers_in_the_browser_are_those_that_were_given(open_page: Callable[..., Any]):
    page = open_page(to_page(TWO, ALIGNING))
    for number, one in enumerate(TWO):
        page.evaluate(f"show({number})")
        for part in PARTS:
            given = getattr(one, part)
            for layer in range(given.shape[0]):
                for head in range(given.shape[1]):
                    read = page.evaluate(f"Array.from(headValues(data.items[{number}], '{part}', {layer}, {head}))")
                    assert np.abs(np.array(read) - given[layer, head].ravel()).max() < 1e-6
        signed = page.evaluate(f"Array.from(unpacked.get(data.items[{number}].attribution.cross))")
        np.testing.assert_allclose(signed, one.src_attribution.ravel(), rtol=1e-6)


def test_heads_are_combined_and_pieces_are_gathered_into_words(open_page: Callable[..., Any]):
    page, one = open_page(to_page(TWO, ALIGNING)), TWO[0]

    def shown() -> NDArray[Any]:
        return np.array(page.evaluate("Array.from(shown.values)"))

    two = one.cross[1, [0, 2]]
    assert "mean of layer 2, heads 1, 3" in page.inner_text("#title")  # the aligning heads come first
    np.testing.assert_allclose(shown(), two.mean(0).ravel(), atol=1e-6)
    page.check("input[value=max]")
    np.testing.assert_allclose(shown(), two.max(0).ravel(), atol=1e-6)
    page.check("input[value=mean]")
    page.check("input[value=words]")
    assert page.locator("#rows li span").all_inner_texts() == ["der", "einundzwanzigste", "März", "</s>"]
    assert page.locator("#columns li span").all_inner_texts() == ["the", "twenty-first", "of", "March", "</s>"]
    rows = np.stack([two.mean(0)[a:b].mean(0) for a, b in ((0, 1), (1, 4), (4, 5), (5, 6))])
    words = np.stack([rows[:, a:b].sum(1) for a, b in ((0, 1), (1, 4), (4, 5), (5, 6), (6, 7))], axis=1)
    np.testing.assert_allclose(shown(), words.ravel(), atol=1e-6)
    page.get_by_role("button", name="Decoder, all heads of layer 1").click()
    assert page.locator("#columns li span").all_inner_texts() == ["<start>", "der", "einundzwanzigste", "März"]
    assert page.locator(".head[aria-pressed=true]").count() == 3


def test_what_is_pointed_at_is_said_and_shown(open_page: Callable[..., Any]):
    page, one = open_page(to_page(TWO, AlignmentConfig())), TWO[0]
    page.get_by_role("button", name="Cross attention, layer 1, head 2").click()
    page.mouse.move(*cell_centre(page, 2, 3))
    said = page.inner_text("#readout")
    assert said.startswith(f"“undzwanzig” looks at “first”: {one.cross[0, 1, 2, 3]:.6f}")
    assert said.endswith(f"gradient × input {one.src_attribution[2, 3]:.6f}")
    assert page.locator("#rows button.active").inner_text().startswith("undzwanzig")
    page.locator("#rows button").nth(0).hover()
    assert page.inner_text("#readout").startswith("“der” looks at “")
    page.wait_for_timeout(100)
    numbers = page.locator("#columns small").all_inner_texts()
    assert [float(text or 0) for text in numbers] == pytest.approx(one.cross[0, 1, 0], abs=0.0051)
    page.mouse.move(1, 1)
    assert page.inner_text("#readout").startswith("Point at")


def test_the_keyboard_does_all_that_a_mouse_does(open_page: Callable[..., Any]):
    page, one = open_page(to_page(TWO, AlignmentConfig())), TWO[0]
    page.get_by_role("button", name="Cross attention, layer 1, head 1").focus()
    page.keyboard.press("ArrowRight")
    assert page.inner_text("#title") == "Cross attention: layer 1, head 2"
    page.keyboard.press("ArrowDown")
    assert page.inner_text("#title") == "Cross attention: layer 2, head 2"
    page.keyboard.press("ArrowUp")
    page.keyboard.press("ArrowUp")
    assert page.inner_text("#title") == "Decoder: layer 2, head 2"
    page.keyboard.press("ArrowDown")
    page.locator(".head[aria-label='Cross attention, layer 1, head 1']").focus()
    page.keyboard.press("Space")
    assert page.inner_text("#title") == "Cross attention: mean of layer 1, heads 1, 2"
    page.keyboard.press("Space")
    page.locator("#map").focus()
    for key in ("ArrowDown", "ArrowDown", "ArrowRight", "ArrowLeft", "ArrowRight", "ArrowDown"):
        page.keyboard.press(key)
    assert f"“undzwanzig” looks at “twenty”: {one.cross[0, 1, 2, 1]:.6f}" in page.inner_text("#readout")
    page.keyboard.press("End")
    assert "“undzwanzig” looks at “</s>”" in page.inner_text("#readout")
    page.keyboard.press("Escape")
    page.locator("#rows button").nth(0).focus()
    page.keyboard.press("ArrowDown")
    assert page.inner_text("#readout").startswith("“ein” looks at “")
    page.keyboard.press("ArrowRight")
    assert page.inner_text("#readout").startswith("“twenty” is looked at by “")
    outline = "getComputedStyle(document.activeElement).outlineStyle"
    assert page.evaluate(outline) == "solid"  # where one is, is seen


def test_a_hypothesis_is_chosen_and_a_word_is_found(open_page: Callable[..., Any]):
    page = open_page(to_page(TWO, ALIGNING))
    assert page.inner_text("#source") == "the twenty-first of March"
    page.select_option("#hypothesis", index=1)
    expect(page.locator("#translation")).to_have_text("der 21. März")
    np.testing.assert_allclose(
        page.evaluate("Array.from(shown.values)"), TWO[1].cross[1, [0, 2]].mean(0).ravel(), atol=1e-6
    )
    page.fill("#query", "mär")
    assert page.inner_text("#matches") == "1 found"
    page.fill("#query", "R")
    assert page.inner_text("#matches") == "4 found; Enter: next"
    page.press("#query", "Enter")
    assert page.inner_text("#readout").startswith("“der” looks at “")
    page.press("#query", "Enter")
    page.press("#query", "Enter")
    assert page.inner_text("#readout").startswith("“first” is looked at by “")
    page.wait_for_timeout(100)
    assert page.locator("button.found").count() == 4


def test_a_film_plays_and_its_frames_can_be_gone_through(open_page: Callable[..., Any]):
    frames = [attention_of("▁two", "▁zwei", seed=seed) for seed in range(1, 6)]
    page = open_page(to_page(frames, AlignmentConfig(), [10, 20, 30, 40, 1000]))
    assert page.inner_text("#update") == "after update 1,000"  # the last comes first
    page.locator("#frame").focus()
    page.keyboard.press("Home")
    expect(page.locator("#update")).to_have_text("after update 10", timeout=60_000)
    np.testing.assert_allclose(page.evaluate("Array.from(shown.values)"), frames[0].cross[1].mean(0).ravel(), atol=1e-6)
    page.click("#play")
    expect(page.locator("#update")).to_have_text("after update 1,000", timeout=60_000)
    expect(page.locator("#play")).to_have_text("Play", timeout=60_000)
    assert page.locator("#hypotheses").is_hidden()


def test_light_and_dark(open_page: Callable[..., Any]):
    colour = "getComputedStyle(document.body).backgroundColor"
    light, dark = (open_page(to_page(TWO, ALIGNING), dark=is_dark) for is_dark in (False, True))
    one, two = light.evaluate(colour), dark.evaluate(colour)
    assert one != two
    for page, other in ((light, two), (dark, one)):
        before = page.evaluate("by('map').toDataURL()")
        page.click("#theme")
        assert page.evaluate(colour) == other
        assert page.evaluate("by('map').toDataURL()") != before


def test_text_is_never_markup(open_page: Callable[..., Any]):
    assert len(HOSTILE) == 150
    for start in range(0, 150, 50):
        some = HOSTILE[start : start + 50]
        base = attention_of(" ".join("a" for _ in some), " ".join("b" for _ in some), layers=1, heads=1)
        one = dataclasses.replace(base, src=(*some, "</s>"), tgt=(*some, "</s>"), source=" ".join(some), text=some[0])
        page = open_page(to_page([one, dataclasses.replace(one, text="\n".join(some))], AlignmentConfig()))
        assert page.locator("#rows li span").all_text_contents() == [*some, "</s>"]
        assert page.locator("#columns li span").all_text_contents() == [*some, "</s>"]
        assert page.text_content("#source") == " ".join(some)
        page.fill("#query", some[0])
        for i in range(0, 50, 7):
            page.locator("#rows button").nth(i).hover()
        page.check("input[value=words]")
        page.locator("#rows button").first.hover()
        assert page.evaluate("window.ran") is None
        assert page.title() == "What looks at what"
        assert page.locator("script").count() == 2
        assert page.locator("iframe, img, svg, form, base, link, template").count() == 0


def test_no_script_runs_but_the_page_s_own(open_page: Callable[..., Any], browser: Any):
    html = to_page(TWO, ALIGNING)
    for injected in ("<script>window.ran = 1</script>", "<img src=x onerror='window.ran = 1'>"):
        context = browser.new_context(offline=True)
        page = context.new_page()
        page.set_content(html.replace("<header>", injected + "<header>"))
        page.wait_for_selector("html[data-ready]", timeout=60_000)
        assert page.evaluate("window.ran") is None  # the policy in the file allows the page's own script alone
        context.close()


@pytest.mark.parametrize("screen", SCREENS)
@pytest.mark.parametrize("dark", [False, True])
def test_axe_finds_nothing(open_page: Callable[..., Any], screen: str, dark: bool):
    pytest.importorskip("axe_playwright_python", reason="axe is not installed: pip install -e '.[dev]'")
    axe = (files("axe_playwright_python") / "axe.min.js").read_text(encoding="utf-8")
    page = open_page(to_page(TWO, ALIGNING), screen, dark)
    page.fill("#query", "r")
    page.locator("#rows button").nth(1).focus()
    page.evaluate(axe)
    found = page.evaluate("axe.run(document)")["violations"]
    assert [(one["id"], one["impact"], [node["html"] for node in one["nodes"]]) for one in found] == []


@pytest.mark.parametrize("screen", SCREENS)
def test_the_page_is_as_wide_as_the_screen_and_no_wider(open_page: Callable[..., Any], screen: str):
    page = open_page(to_page(TWO, ALIGNING), screen)
    assert page.evaluate("document.documentElement.scrollWidth") <= SCREENS[screen][0]
    assert page.locator("#map").bounding_box()["width"] > 150


def linear(colour: str) -> NDArray[Any]:
    values = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    return np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)


# how those see who lack one kind of cone: Machado, Oliveira and Fernandes 2009, severity 1
COLOUR_BLIND = {
    "all cones": np.eye(3),
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "tritanopia": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
}


@pytest.mark.parametrize("sight", COLOUR_BLIND)
def test_the_colours_are_read_by_lightness_alone(open_page: Callable[..., Any], sight: str):
    ramps = open_page(to_page(TWO, ALIGNING)).evaluate("RAMPS")
    for ramp in ramps.values():
        seen = [np.clip(np.array(COLOUR_BLIND[sight]) @ linear(colour), 0, 1) for colour in ramp]
        lightness = np.array([one @ [0.2126, 0.7152, 0.0722] for one in seen]) ** (1 / 3)
        steps = np.diff(lightness) * np.sign(lightness[-1] - lightness[0])
        assert steps.min() > 0.05


def test_two_hundred_pieces_a_side_of_the_base_model(open_page: Callable[..., Any]):
    """6 + 6 layers of 8 heads, in seconds that the page itself computed: other programs do not count."""
    text = " ".join(f"▁w{i}" for i in range(199))
    html = to_page([attention_of(text, text, layers=6, heads=8)], AlignmentConfig())
    assert len(html.encode()) <= LARGEST
    page = open_page(html)
    session = page.context.new_cdp_session(page)
    session.send("Performance.enable", {"timeDomain": "threadTicks"})
    page.reload()
    page.wait_for_selector("html[data-ready]", timeout=120_000)
    metrics = {one["name"]: one["value"] for one in session.send("Performance.getMetrics")["metrics"]}
    wall = page.evaluate("performance.now()") / 1000
    print(json.dumps({"MB": len(html.encode()) / 1e6, "thread s": metrics["TaskDuration"], "open s": wall}))
    assert metrics["TaskDuration"] < 2
    before = metrics["TaskDuration"]
    x, y = cell_centre(page, 0, 0)
    for step in range(50):
        page.mouse.move(x + 2 * step, y + 2 * step)
    page.wait_for_timeout(200)
    metrics = {one["name"]: one["value"] for one in session.send("Performance.getMetrics")["metrics"]}
    assert (metrics["TaskDuration"] - before) / 50 < 0.1  # seconds for a movement of the mouse
