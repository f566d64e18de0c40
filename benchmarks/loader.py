"""How many target pieces a second are read, encoded and cut into batches ahead of the step; nobody trains beside.

python -m benchmarks.loader CORPUS SECONDS      as JSON, by the number of worker processes
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.task import SRC, TGT, UPDATE_PIECES
from diglot.config import load_recipe
from diglot.loader import UpdateReader, read_updates
from diglot.parallel import World
from diglot.progress import Reporter
from diglot.run import Job, TrainingState
from diglot.texts import read_texts

WARM_UPDATES = 8  # until the workers have begun


def measure(corpus: Path, seconds: float, num_workers: int, run: Path) -> float:
    """Target pieces a second that come out of the workers."""
    files = {"src": f"train.{SRC}", "tgt": f"train.{TGT}", "valid_src": f"valid.{SRC}", "valid_tgt": f"valid.{TGT}"}
    words = [f"data.{key}={corpus / name}" for key, name in files.items()]
    words += [f"subwords.model={corpus / 'subwords.model'}", f"train.update_pieces={UPDATE_PIECES}"]
    recipe = load_recipe(None, "tiny", tuple(words))
    texts = read_texts(Job(recipe, run, World(), "cpu", False, Reporter(quiet=True)), None)
    reader = UpdateReader(texts, recipe, World(), micro_batch=int(recipe.data.micro_batch))
    pieces, begun = 0, 0.0
    for number, update in enumerate(read_updates(reader, TrainingState(), num_workers)):
        if number < WARM_UPDATES:
            begun = time.monotonic()
            continue
        pieces += update.num_pieces
        if time.monotonic() - begun > seconds:
            break
    return pieces / (time.monotonic() - begun)


def main() -> None:
    """With one worker, as beside a CPU, and with two."""
    corpus, seconds = Path(sys.argv[1]), float(sys.argv[2])
    with tempfile.TemporaryDirectory() as run:
        print(json.dumps({number: measure(corpus, seconds, number, Path(run)) for number in (1, 2)}))


if __name__ == "__main__":
    main()
