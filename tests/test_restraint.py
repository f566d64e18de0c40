"""What keeps the project small: layers of imports, lengths of modules, the list of options, what must not be in it."""

from __future__ import annotations

import ast
import dataclasses
import re
import subprocess
import sys
from pathlib import Path

import pytest

import diglot
from diglot.config import Recipe

SOURCE = Path(diglot.__file__).parent
MODULES = sorted(SOURCE.rglob("*.py"))
# A module imports only from rows above its own.
ROWS = [
    ["errors"],
    ["config", "signals"],
    ["runs"],
    ["model", "schedule", "kernels"],
    ["loss", "packed"],
    ["search"],
    ["subwords", "segments"],
    ["batching"],
    ["corpus"],
    ["index", "streams"],
    ["checkpoint"],
    ["engines.torch"],
    ["translator", "evaluate"],
    ["alignment"],
    ["drawing"],
    ["attend"],
    ["progress", "pulse", "robustness"],
    ["leaks"],
    ["parallel"],
    ["run"],
    ["validation", "info"],
    ["texts"],
    ["loader"],
    ["memory"],
    ["training", "report"],
    ["demo", "verify"],
    ["interop.pieces", "interop.files"],
    ["interop.weights", "interop.probe"],
    ["interop.marian_hf", "interop.ctranslate2", "interop.marian"],
    ["interop.convert"],
    ["options"],
    ["cli_models"],
    ["cli"],
    ["__main__"],
]


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(SOURCE).with_suffix("").parts)


def imports_of(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module == "diglot.interop":
            found |= {f"interop.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("diglot."):
            found.add(node.module.removeprefix("diglot."))
        elif isinstance(node, ast.ImportFrom) and node.module == "diglot":
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {a.name.removeprefix("diglot.") for a in node.names if a.name.startswith("diglot.")}
    return found


def test_a_module_imports_only_from_rows_above_its_own():
    row_of = {name: number for number, row in enumerate(ROWS) for name in row}
    assert {name_of(p) for p in MODULES if p.name != "__init__.py"} == set(row_of)
    for path in MODULES:
        if path.name != "__init__.py":
            name = name_of(path)
            assert all(row_of[used] < row_of[name] for used in imports_of(path)), (name, imports_of(path))


def test_the_model_imports_only_the_configuration():
    assert imports_of(SOURCE / "model.py") == {"config"}


def test_the_search_sees_no_model():
    assert imports_of(SOURCE / "search.py") == set()


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_modules_stay_short(path: Path):
    num_lines = len(path.read_text(encoding="utf-8").split("\n")) - 1
    assert num_lines <= (500 if path.name == "model.py" else 600)


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_functions_fit_on_a_screen(path: Path):
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef):
            length = (node.end_lineno or 0) - node.lineno + 1
            allowed = 110 if node.name == "train" and path.name == "training.py" else 80
            assert length <= allowed, f"{path.name}: {node.name} has {length} lines"


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_nothing_is_unpickled_or_evaluated(path: Path):
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call):
            if ast.unparse(node.func) == "torch.load":  # of other engines' models alone, and tensors alone
                assert "weights_only=True" in ast.unparse(node)
                assert path.parent.name == "interop"
            assert ast.unparse(node.func) not in (
                "eval",
                "exec",
                "torch.save",
                "pickle.load",
                "pickle.loads",
            )
        if isinstance(node, ast.Import | ast.ImportFrom):
            assert not re.search(r"\b(pickle|requests|urllib|http|socket)\b", ast.unparse(node))


def test_the_list_of_options():
    # A new option is seen here. It needs a reason why a decision would not do, and a test of each of its values.
    options = {
        s.name: [f.name for f in dataclasses.fields(getattr(Recipe(), s.name))] for s in dataclasses.fields(Recipe)
    }
    assert options == {
        "model": [
            "d_model", "d_ff", "num_heads", "d_k", "num_encoder_layers", "num_decoder_layers", "dropout",
            "attention_dropout", "ffn_dropout", "norm", "positions", "max_positions",
            "position_base", "tie", "activation", "attention_bias", "output_bias", "norm_epsilon",
        ],
        "languages": ["src", "tgt", "tags"],
        "subwords": ["type", "size", "joint", "model", "src_model", "tgt_model", "sampling"],
        "data": [
            "src", "tgt", "tsv", "valid_src", "valid_tgt", "valid_tsv", "weights",
            "temperature", "tgt_langs", "valid_tgt_langs", "held_out", "max_pieces", "max_ratio",
            "drop_duplicates", "drop_same", "micro_batch",
        ],
        "train": [
            "out", "init", "seed", "max_updates", "update_pieces", "warmup_steps", "learning_rate_scale",
            "label_smoothing", "clip_norm", "valid_every", "patience", "average", "log_every", "tensorboard",
            "watch", "precision", "strategy", "rank_timeout", "device", "threads",
        ],
        "search": [
            "method", "beam_size", "length_penalty", "max_extra", "num_best", "temperature", "top_k", "top_p", "seed",
            "max_segment",
        ],
    }  # fmt: skip


def test_the_public_names_exist_and_nothing_heavy_is_imported_for_them():
    for name in diglot.__all__:
        assert getattr(diglot, name) is not None
    heavy = "print([name for name in ('torch', 'numpy', 'sacrebleu') if name in sys.modules])"
    code = f"import sys, diglot, diglot.cli, diglot.runs; {heavy}"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_an_unknown_public_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = diglot.nothing


def test_the_packages_that_are_tested_are_the_ones_that_are_allowed():
    root = SOURCE.parents[1]
    constraints = dict(re.findall(r"^([\w.-]+)==([\w.]+)$", (root / "constraints.txt").read_text(), re.M))
    declared = re.findall(r'^    "([\w-]+)(?:\[\w+\])?>=([\d.]+)"', (root / "pyproject.toml").read_text(), re.M)
    for name, least in declared:
        tested = constraints[name.replace("-", "_")] if name.replace("-", "_") in constraints else constraints[name]
        assert tuple(map(int, tested.split("."))) >= tuple(map(int, least.split(".")))
