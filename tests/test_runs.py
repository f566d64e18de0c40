"""What `diglot runs` says of runs in every state, and of what is no run."""

from __future__ import annotations

import fcntl
import json
import subprocess
import sys
from pathlib import Path

import pytest

from diglot.runs import RunStatus, list_runs
from diglot.training import train
from training_runs import small_recipe

LOSS = '{"update": %d, "epoch": 2, "loss": 5.0}\n'


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a run in each state, and other things."""
    directory = tmp_path_factory.mktemp("runs")
    train(small_recipe(directory, "finished"), quiet=True)
    config = (directory / "finished" / "config.toml").read_text()

    def write(name: str, log: str | None, best: float | None = None, update: int = 0) -> Path:
        run = directory / name
        run.mkdir(parents=True)
        (run / ".lock").touch()
        (run / "config.toml").write_text(config)
        if log is not None:
            (run / "log.jsonl").write_text(log)
        if best is not None:
            state = {"update": update, "epoch": 1, "best_bleu": best, "best_update": update}
            (run / f"step-{update:06d}").mkdir()
            (run / f"step-{update:06d}" / "state.json").write_text(json.dumps(state))
        return run

    write("deeper/stopped", LOSS % 4 + '{"update": 5, "stopped": 15}\n', best=12.5, update=5)
    write("deeper/killed", "half a line\n" * 9000 + LOSS % 4 + LOSS[:9], best=1.0, update=3)
    write("running", LOSS % 4)
    write("further", '{"update": 6, "final": "average", "final_bleu": 9.0}\n' + LOSS % 7)
    (write("empty", None) / "config.toml").unlink()
    (write("no-toml", LOSS % 1) / "config.toml").write_text("[train")
    write("no-log", "no log\n")
    (write("no-text", None) / "log.jsonl").mkdir()
    (write("no-state", LOSS % 1) / "step-000001").mkdir()
    (directory / "notes" / "old").mkdir(parents=True)
    (directory / "notes" / "a.txt").touch()
    return directory


def seen(root: Path) -> dict[str, RunStatus]:
    return {str(Path(one.run).relative_to(root)): one for one in list_runs(root)}


def test_each_run_has_its_state(root: Path):
    with (root / "running" / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        found = seen(root)
    assert {name: one.state for name, one in found.items()} == {
        "deeper/killed": "failed-or-killed", "deeper/stopped": "stopped", "empty": "empty", "finished": "finished",
        "further": "failed-or-killed", "no-log": "unreadable", "no-state": "unreadable", "no-text": "unreadable",
        "no-toml": "unreadable", "notes": "no-run", "running": "running",
    }  # fmt: skip
    stopped = found["deeper/stopped"]
    assert (stopped.update, stopped.goal, stopped.epoch, stopped.best_bleu, stopped.best_update) == (5, 6, 2, 12.5, 5)
    assert found["finished"].final_bleu is not None
    assert found["finished"].update == 6
    assert "config.toml is not TOML" in found["no-toml"].remark
    assert "log.jsonl: Is a directory" in found["no-text"].remark
    assert all(one.remark for one in found.values() if one.state in ("unreadable", "no-run"))
    assert seen(root)["running"].state == "failed-or-killed"  # the file of a lock that nobody holds means nothing


def test_a_run_directory_is_listed_itself_and_a_model_is_none(root: Path):
    assert [one.state for one in list_runs(root / "finished")] == ["finished"]
    assert list_runs(root / "finished" / "model") == []


def test_looking_disturbs_no_run_that_starts(root: Path, tmp_path: Path):
    recipe = small_recipe(tmp_path, "run", "train.max_updates=1")
    (tmp_path / "run").mkdir()
    with (tmp_path / "run" / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)  # as whoever looks holds it for an instant
        code = "import fcntl, sys, time; time.sleep(0.3); fcntl.flock(int(sys.argv[1]), fcntl.LOCK_UN)"
        with subprocess.Popen([sys.executable, "-c", code, str(lock.fileno())], pass_fds=[lock.fileno()]):
            assert train(recipe, quiet=True).updates == 1


def test_the_command_prints_a_table_or_json(root: Path):
    command = [sys.executable, "-m", "diglot", "runs", str(root)]
    table = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert table[0].split() == ["RUN", "STATE", "UPDATE", "EPOCH", "BEST_BLEU", "FINAL_BLEU", "LAST_ACTIVITY"]
    rows = {line.split()[0]: line.split()[1:7] for line in table[1:]}
    assert rows[f"{root}/deeper/stopped"][:5] == ["stopped", "5/6", "2", "12.50@5", "-"]
    out = subprocess.run([*command, "--json"], capture_output=True, text=True, check=True).stdout
    assert {one["run"]: one["state"] for one in json.loads(out)} == {name: row[0] for name, row in rows.items()}
