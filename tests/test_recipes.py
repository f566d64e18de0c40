"""The recipes: what they say is what their sources say, and no figure of theirs is written by hand."""

from __future__ import annotations

import json
import re
import runpy
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from diglot.config import Recipe, load_recipe
from diglot.model import Transformer
from diglot.schedule import lrate

RECIPES = Path(__file__).parents[1] / "recipes"
ALL = sorted(RECIPES.glob("*/*.toml"))
RESULTS = runpy.run_path(str(RECIPES / "results.py"))


def name_of(path: Path) -> str:
    return f"{path.parent.name}/{path.stem}"


@pytest.mark.parametrize("path", ALL, ids=name_of)
def test_a_recipe_loads_and_one_command_goes_from_its_text_to_its_score(path: Path):
    recipe = load_recipe(path)
    assert recipe.languages.src
    done = subprocess.run(
        ["make", "-n", "-C", RECIPES, name_of(path), "SEED=3", "WORDS=train.threads=1"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert (
        f"train {name_of(path)}.toml train.out=runs/{name_of(path)}/seed-3 train.seed=3 train.threads=1" in done.stdout
    )
    languages = recipe.languages.src, recipe.languages.tgt
    tested = re.search(r"/model (\S+)\.(\w+) (\S+)\.(\w+)", done.stdout)
    assert tested
    assert (tested[1], tested[2], tested[4]) == (tested[3], *languages)
    files = [*zip(recipe.data.src, recipe.data.tgt, strict=True)]
    for src, tgt in (*files, (recipe.data.valid_src[0], recipe.data.valid_tgt[0])):
        assert (src.rpartition("."), tgt.rpartition(".")) == tuple(
            (src.rpartition(".")[0], ".", one) for one in languages
        )
        assert "test" not in Path(src).name.replace("newstest2013", "")  # a test set is for the end alone
    readme = (path.parent / "README.md").read_text()
    for word in ("| data |", "| licence |", "| from |", "| hardware |", f"make -C recipes {path.parent.name}/"):
        assert word in readme


@pytest.mark.parametrize("path", ALL, ids=name_of)
def test_the_text_of_a_recipe_is_as_its_readme_counts_it(path: Path, data: Path):
    names = load_recipe(path).data
    files = [data / name.removeprefix("data/") for name in (*names.src, *names.tgt, *names.valid_src, *names.valid_tgt)]
    if not all(file.exists() for file in files):
        pytest.skip(f"{files[0]} or others are not here")
    num = files[0].read_bytes().count(b"\n")
    assert f"{num:,} / " in (path.parent / "README.md").read_text()


def published() -> Recipe:
    return load_recipe(RECIPES / "multi30k-tiny" / "published.toml")


def test_the_published_protocol_is_kept():
    recipe = published()
    with torch.device("meta"):
        model = Transformer(recipe.model, recipe.subwords.size, recipe.subwords.size)
    assert sum(p.numel() for p in model.parameters()) <= 2_700_000
    assert (recipe.subwords.type, recipe.subwords.size, recipe.subwords.joint) == ("bpe", 10_000, True)
    train = recipe.train
    assert (train.update_pieces, train.max_updates, train.average) == (8192, 8000, 10)
    peak = lrate(2000, recipe.model.d_model, train.warmup_steps, train.learning_rate_scale)
    assert peak == pytest.approx(0.005, rel=1e-3)
    assert peak > lrate(1999, recipe.model.d_model, train.warmup_steps, train.learning_rate_scale)
    assert recipe.search.beam_size == 5
    assert all("tok_lc" in name for name in (*recipe.data.src, *recipe.data.valid_tgt))


def test_the_raw_recipes_train_the_same_network_in_the_same_way():
    for path in RECIPES.glob("multi30k-tiny/raw-*.toml"):
        recipe = load_recipe(path)
        for part in ("model", "subwords", "train", "search"):
            assert getattr(recipe, part) == getattr(published(), part)


@pytest.mark.parametrize(("target", "size"), [("de", 37_000), ("fr", 32_000)])
@pytest.mark.parametrize(
    ("kind", "num_updates", "average", "layers"), [("base", 100_000, 5, 512), ("big", 300_000, 20, 1024)]
)
def test_the_papers_recipes_are_the_papers(
    target: str, size: int, kind: str, num_updates: int, average: int, layers: int
):
    recipe = load_recipe(RECIPES / f"wmt14-en-{target}" / f"{kind}.toml")
    train, search = recipe.train, recipe.search
    assert (recipe.model.d_model, recipe.model.norm, recipe.subwords.size) == (layers, "post", size)
    assert recipe.model.dropout == (0.3 if (kind, target) == ("big", "de") else 0.1)
    assert (train.update_pieces, train.max_updates, train.average) == (25_000, num_updates, average)
    assert (train.warmup_steps, train.learning_rate_scale, train.label_smoothing) == (4000, 1, 0.1)
    assert train.patience == 0
    assert (search.beam_size, search.length_penalty, search.max_extra) == (4, 0.6, 50)
    made = subprocess.run(
        ["make", "-n", "-C", RECIPES, f"wmt14-en-{target}/{kind}"], capture_output=True, text=True, check=True
    ).stdout
    assert "torch.distributed.run --standalone --nproc-per-node 8 -m diglot train" in made
    assert f"./tokenise data/mosesdecoder {target} < data/wmt14/newstest2014-{target}en.{target}" in made
    assert "--tokenized --json" in made
    assert "Not run" in (RECIPES / f"wmt14-en-{target}" / "README.md").read_text()


def test_the_tables_of_the_readmes_are_those_of_the_result_files():
    pages = RESULTS["pages"]()
    assert len(pages) == 3 + len({path.parent for path in ALL})
    for path, text in pages.items():
        assert path.read_text(encoding="utf-8") == text, f"make -C recipes tables ({path.name} is not up to date)"
        assert "| BLEU |" in text, f"{path} has no markers for its table"


def write_result(path: Path, bleu: float, signature: str = "tok:none|smooth:exp") -> None:
    score = {"value": bleu, "interval": 0.9, "signature": signature}
    model = {"parameters": 2_649_600, "training": {"seconds": 5400}}
    scores = dict.fromkeys(("BLEU", "chrF2", "TER"), score)
    path.write_text(json.dumps({"systems": [{"scores": scores, "model": model}]}))


def test_a_result_file_is_a_row_and_several_are_their_mean(tmp_path: Path):
    shutil.copytree(RECIPES, tmp_path / "recipes", ignore=shutil.ignore_patterns("*.json", "data", "runs"))
    for name in ("README.md", "README.zh.md"):
        shutil.copy(RECIPES.parent / name, tmp_path / name)
    folder = tmp_path / "recipes" / "multi30k-tiny"
    row = "| multi30k-tiny/published |"
    readme = tmp_path / "README.md"
    assert f"{row} not run |  |  |  |  |  |\n" in RESULTS["pages"](tmp_path / "recipes")[readme]
    write_result(folder / "published.seed-1.json", 40.5)
    one = f"{row} 40.50 ± 0.90 | 40.50 ± 0.90 | 40.50 ± 0.90 | 2,649,600 | 1.5 hours | tok:none, smooth:exp |\n"
    assert one in RESULTS["pages"](tmp_path / "recipes")[readme]
    write_result(folder / "published.seed-2.json", 41.5)
    pages = RESULTS["pages"](tmp_path / "recipes")
    assert f"{row} 41.00 (40.50 to 41.50, 2 runs) | " in pages[readme]
    assert f"{row} 41.00 (40.50 至 41.50，2 次) | " in pages[tmp_path / "README.zh.md"]
    assert f"{row} 41.00 (40.50 to 41.50, 2 runs) | " in pages[folder / "README.md"]
    assert "published" not in pages[tmp_path / "recipes" / "tatoeba-en-zh" / "README.md"].split("<!-- results -->")[1]
    write_result(tmp_path / "recipes" / "wmt14-en-de" / "big.seed-1.tokenised.json", 28.0)
    found = RESULTS["pages"](tmp_path / "recipes")[readme]
    assert "| wmt14-en-de/big, tokenised | 28.00 ± 0.90 |" in found
    assert "| wmt14-en-de/big | not run |" in found
    write_result(folder / "published.seed-3.json", 41.0, "tok:13a")
    with pytest.raises(SystemExit, match="not comparable"):
        RESULTS["pages"](tmp_path / "recipes")


@pytest.mark.skipif(shutil.which("perl") is None, reason="Moses' tokeniser is in Perl, which is not here")
def test_german_compounds_are_split_at_their_hyphens_as_the_paper_did(tmp_path: Path):
    moses = tmp_path / "scripts" / "tokenizer"
    moses.mkdir(parents=True)
    for name in ("replace-unicode-punctuation.perl", "tokenizer.perl"):  # what they do is theirs; this is what follows
        (moses / name).write_text("print while <STDIN>;")
    for language, expected in (("de", "ein rich ##AT##-##AT## text - Format\n"), ("fr", "ein rich-text - Format\n")):
        found = subprocess.run(
            [RECIPES / "tokenise", tmp_path, language],
            input="ein rich-text - Format\n",
            capture_output=True,
            text=True,
            check=True,
        )
        assert found.stdout == expected
