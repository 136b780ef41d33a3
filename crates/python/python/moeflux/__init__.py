"""Mixture-of-Experts language models that are larger than memory.

    import moeflux
    model = moeflux.Model.open("mlx-community/Qwen3-30B-A3B-4bit", memory="8GiB")
    print(model.chat("Why is the sky blue?").text)

Calls that compute release the GIL, end with KeyboardInterrupt on Ctrl-C in the main thread, and may
run in several threads at once: they then share steps and expert reads. Nothing is printed and no
signal handler or environment variable is set by importing. numpy is needed only where arrays are
returned.
"""

from ._answers import Answer, Delta, Failed, Plan, Score, Stats, Synced, TokenLogprob, Usage
from ._errors import (
    BudgetError,
    BusyError,
    Cancelled,
    CheckpointError,
    ClosedError,
    ContextError,
    DeviceError,
    Error,
    FileError,
    ForkedError,
    GrammarError,
    HubError,
    ReadError,
    SamplingError,
    SnapshotError,
    UnsupportedError,
)
from ._forms import Form
from ._logs import log_to
from ._model import Model, Tokenizer, devices, pull
from ._native import __version__
from ._options import Bytes, Cancel, ChatOptions, Finish, Message, Messages, OpenOptions, Progress
from ._options import Prompt, Sampling, Tokens, ToolCall, ToolFunction
from ._serving import Server
from ._session import Mark, Session
from ._streams import Stream

__all__ = [
    "Answer",
    "BudgetError",
    "BusyError",
    "Bytes",
    "Cancel",
    "Cancelled",
    "ChatOptions",
    "CheckpointError",
    "ClosedError",
    "ContextError",
    "Delta",
    "DeviceError",
    "Error",
    "Failed",
    "FileError",
    "Finish",
    "ForkedError",
    "Form",
    "GrammarError",
    "HubError",
    "Mark",
    "Message",
    "Messages",
    "Model",
    "OpenOptions",
    "Plan",
    "Progress",
    "Prompt",
    "ReadError",
    "Sampling",
    "SamplingError",
    "Score",
    "Server",
    "Session",
    "SnapshotError",
    "Stats",
    "Stream",
    "Synced",
    "TokenLogprob",
    "Tokenizer",
    "Tokens",
    "ToolCall",
    "ToolFunction",
    "UnsupportedError",
    "Usage",
    "__version__",
    "devices",
    "log_to",
    "pull",
]
