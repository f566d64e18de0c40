"""How the documentation is built, by `make docs`. Sphinx starts from the root: there are recipes and the changelog too.

Three things are our own. A link to a file that is no page (`../src/diglot/model.py#attention`) leads to a page of its
source, at the line where the name is defined. Formulas become MathML, which browsers draw by themselves: the pages load
nothing from anywhere. The commands and the options are described from the code, at each build.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer.main
from docutils import nodes
from docutils.utils.math.latex2mathml import tex2mathml
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import TextLexer, get_lexer_for_filename
from pygments.util import ClassNotFound
from sphinx.application import Sphinx
from sphinx.util import logging
from sphinx.util.docutils import SphinxDirective

import diglot
from diglot.cli import app as commands
from diglot.config import PRESETS, Recipe

ROOT = Path(__file__).parents[1]
logger = logging.getLogger(__name__)

project = "diglot"
author = project_copyright = "The diglot authors"
release = diglot.__version__
root_doc = "docs/index"
include_patterns = ["docs/**.md", "recipes/*/README.md", "benchmarks/README.md", "CHANGELOG.md", "CONTRIBUTING.md"]
exclude_patterns = [".*", "build", "runs", "src", "tests"]
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.linkcode"]

myst_enable_extensions = ["attrs_inline", "deflist", "dollarmath"]
myst_heading_anchors = 3
default_role = "literal"  # a docstring's `name`
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
smartquotes = False  # quotes are often of code

html_theme = "furo"
html_title = "diglot"
html_static_path = ["static"]
html_css_files = ["diglot.css"]
html_copy_source = False
html_show_sphinx = False
html_math_renderer = "mathml"
pygments_style, pygments_dark_style = "tango", "github-dark"


# ------------------------------------------------------------------- pages of source

shown = {*(ROOT / "src" / "diglot").rglob("*.py")}  # and whatever else a link leads to


def definitions(path: Path) -> dict[str, int]:
    """The names that a Python file defines, with their lines; those in a class with a dot."""
    found: dict[str, int] = {}

    def visit(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            match child:
                case ast.FunctionDef() | ast.ClassDef():
                    found[prefix + child.name] = child.lineno
                    visit(child, f"{prefix}{child.name}.")
                case ast.AnnAssign(target=ast.Name(id=name)) | ast.Assign(targets=[ast.Name(id=name)]):
                    found[prefix + name] = child.lineno
                case _:
                    pass

    visit(ast.parse(path.read_text(encoding="utf-8")), "")
    return found


def source_url(path: Path, name: str, docname: str) -> str:
    """Where a page finds the source of a file, at the definition of a name."""
    shown.add(path)
    url = os.path.relpath(f"source/{path.relative_to(ROOT).as_posix()}.html", Path(docname).parent)
    return f"{url}#L-{definitions(path)[name]}" if name else url


def link_to_source(app: Sphinx, docname: str, source: list[str]) -> None:
    """Lead the links of a page to files that are no pages to their source."""
    here = Path(app.env.doc2path(docname)).parent
    pages = {Path(app.env.doc2path(name)) for name in app.env.found_docs}

    def rewrite(link: re.Match[str]) -> str:
        path, name = (here / link[2]).resolve(), link[3] or ""
        if not path.exists() or path in pages:
            return link[0]  # Sphinx resolves it, or warns
        if name and (path.suffix != ".py" or name not in definitions(path)):
            logger.warning("%s defines no %s", link[2], name, location=docname)
            return link[0]
        return f"{link[1]}({source_url(path, name, docname)}){{.external}}"

    parts = re.split(r"(^```.*?^```$)", source[0], flags=re.MULTILINE | re.DOTALL)  # code is left alone
    parts[::2] = (
        re.sub(r"(?<!!)(\[[^\]]*\])\((?!\w+:|#)([^)\s#]+)(?:#([\w.]+))?\)", rewrite, part) for part in parts[::2]
    )
    source[0] = "".join(parts)


def linkcode_resolve(domain: str, info: dict[str, str]) -> str:
    """The source of what the Python reference describes."""
    home = getattr(diglot, info["fullname"].split(".")[0]).__module__  # diglot.model, of what is diglot.attention
    path = ROOT / "src" / Path(*home.split(".")).with_suffix(".py")
    return source_url(path, info["fullname"], "docs/reference/python")


def source_pages(app: Sphinx) -> Iterator[tuple[str, dict[str, Any], str]]:
    """A page for each file that a link leads to; of a directory, a list of its files."""
    for path in sorted(shown | {file for folder in shown if folder.is_dir() for file in listed(folder)}):
        name = path.relative_to(ROOT).as_posix()
        if path.is_dir():
            items = (f'<li><a href="{path.name}/{file.name}.html">{file.name}</a></li>' for file in listed(path))
            body = f"<ul>{''.join(items)}</ul>"
        else:
            try:
                lexer = get_lexer_for_filename(path.name)
            except ClassNotFound:
                lexer = TextLexer()
            formatter = HtmlFormatter(lineanchors="L", cssclass="highlight source")
            body = highlight(path.read_text(encoding="utf-8"), lexer, formatter)
        yield f"source/{name}", {"title": name, "body": f"<h1>{name}</h1>{body}"}, "page.html"


def listed(folder: Path) -> list[Path]:
    """The files of a directory that are text of ours."""
    return sorted(path for path in folder.iterdir() if path.is_file() and not path.name.startswith("."))


# ------------------------------------------------------------------- described from the code


class Commands(SphinxDirective):
    """All commands, as their `--help` describes them."""

    def run(self) -> list[nodes.Node]:
        """A section for each command."""
        group: Any = typer.main.get_command(commands)  # of Typer's own copy of click
        parent = group.make_context("diglot", [], resilient_parsing=True)
        lines: list[str] = []
        for name, command in group.commands.items():
            context = command.make_context(name, [], parent=parent, resilient_parsing=True)
            text, _, examples = inspect.cleandoc(command.help).partition("\b\n")
            usage = " ".join((context.command_path, *command.collect_usage_pieces(context)))
            lines += [f"## diglot {name}", "", text, "", "```text", usage, "```", ""]
            for parameter in command.params:
                words, meaning = parameter.get_help_record(context)
                if parameter.param_type_name == "argument":
                    words = words.partition(" <")[0]  # its type says less than its name
                lines += [f"`{words}`", f": {meaning}", ""]
            lines += ["```text", examples.rstrip(), "```", ""]
        return self.parse_text_to_nodes("\n".join(lines), allow_section_headings=True)


class Options(SphinxDirective):
    """All keys of a recipe, their defaults, their meaning, and what the presets say instead."""

    def run(self) -> list[nodes.Node]:
        """A section for each section of a recipe."""
        lines: list[str] = []
        for section in dataclasses.fields(Recipe):
            values = getattr(Recipe(), section.name)
            lines += [f"## [{section.name}]", "", type(values).__doc__ or "", ""]
            for field in dataclasses.fields(values):
                words = [field.metadata["help"]]
                if field.metadata["choices"]:
                    words.append("one of " + ", ".join(f"`{choice}`" for choice in field.metadata["choices"]))
                for preset, table in PRESETS.items():
                    if field.name in table.get(section.name, {}):
                        words.append(f"{preset}: `{json.dumps(table[section.name][field.name])}`")
                default = json.dumps(getattr(values, field.name))
                lines += [f"`{field.name} = {default}`", f": {'; '.join(words)}", ""]
        return self.parse_text_to_nodes("\n".join(lines), allow_section_headings=True)


# ------------------------------------------------------------------- formulas


def inline_formula(translator: Any, node: nodes.math) -> None:
    """A formula within a line."""
    translator.body.append(tex2mathml(node.astext()))
    raise nodes.SkipNode


def display_formula(translator: Any, node: nodes.math_block) -> None:
    """A formula on lines of its own."""
    translator.body.append(f'<div class="formula">{tex2mathml(node.astext(), as_block=True)}</div>')
    raise nodes.SkipNode


def write_entrance(app: Sphinx, error: Exception | None) -> None:
    """Lead from the directory that is built to its first page."""
    if not error:
        entrance = '<!doctype html><title>diglot</title><meta http-equiv="refresh" content="0; url=docs/index.html">\n'
        (Path(app.outdir) / "index.html").write_text(entrance, encoding="utf-8")


def setup(app: Sphinx) -> None:
    """Tell Sphinx of what is ours."""
    app.add_directive("commands", Commands)
    app.add_directive("options", Options)
    app.add_html_math_renderer("mathml", (inline_formula, None), (display_formula, None))
    app.connect("source-read", link_to_source)
    app.connect("html-collect-pages", source_pages)
    app.connect("build-finished", write_entrance)
