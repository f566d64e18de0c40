"""What a user can cause. The command line prints these as one sentence, without a traceback, and exits with 1.

A message says what happened, the value at fault with its file and line, and what to do.
"""


class DiglotError(Exception):
    """What the user gave cannot be used; the message says why and what to do."""


class ConfigError(DiglotError):
    """A recipe, an option or a combination of options is wrong."""


class TextError(DiglotError):
    """A text file is missing, unreadable, or not what it should be."""


class CheckpointError(DiglotError):
    """A model directory or a run directory is missing, broken or of another version."""


class ConversionError(DiglotError):
    """A model of another engine cannot be read, or a model cannot be written for it."""


class TrainingError(DiglotError):
    """Training cannot go on."""


class RankError(TrainingError):
    """Another rank failed, the message being its own, or was lost."""

    def __init__(self, message: str, rank: int | None = None):
        super().__init__(message)
        self.rank = rank  # that failed


class Interrupted(Exception):  # noqa: N818
    """A signal asked for an end, and all is saved; the message says how to go on."""

    def __init__(self, signal_number: int, message: str):
        super().__init__(message)
        self.signal_number = signal_number


def on_one_line(text: str) -> str:
    """What a message quotes of a stranger's files moves no cursor and begins no line."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)
