"""Dumps: the graph before and after each pass, as files and in torch's structured trace."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from torch.fx import GraphModule

from autoshard.cache import writable
from autoshard.errors import ConfigError
from autoshard.torch_internals import emit_artifact


@dataclass
class Dump:
    """Writes to `folder`; with None only torch's structured trace gets anything."""

    folder: Path | None
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    @staticmethod
    def of(folder: str | Path | None, rank: int) -> Dump:
        """The dump that a config or AUTOSHARD_DUMP asks for, a folder a rank. ConfigError where that cannot be written."""
        chosen = folder or os.environ.get("AUTOSHARD_DUMP")
        if not chosen:
            return Dump(None)
        path = Path(chosen) / f"rank{rank}"
        if not writable(path / "passes.jsonl"):
            said = "dump_dir" if folder else "AUTOSHARD_DUMP"
            raise ConfigError(f"{said}: {str(path)!r} cannot be written; legal: a folder that this user may make and write to")
        return Dump(path)

    def text(self, gm: GraphModule) -> str:
        """The graph as Python, with shapes; empty if nobody reads it."""
        if self.folder is None:
            return ""
        return gm.print_readable(print_output=False, include_stride=True)

    def write(
        self,
        name: str,
        phase: str,
        before: str,
        after: str,
        changed: dict[str, int],
        seconds: float,
    ) -> None:
        """One pass: NN_<pass>_<phase>_before.py, _after.py, and a line in passes.jsonl."""
        record = {"pass": name, "graph": phase, "seconds": round(seconds, 6), "ops": changed}
        emit_artifact(f"autoshard_{name}_{phase}", lambda: json.dumps(record))
        if self.folder is None:
            return
        stem = f"{next(self._numbers):02d}_{name}_{phase}"
        self._put(f"{stem}_before.py", before)
        self._put(f"{stem}_after.py", after)
        self._put("passes.jsonl", json.dumps(record) + "\n", "a")

    def sources(self, gm: GraphModule) -> None:
        """The kernels that were generated for calls of this graph, each a file."""
        if self.folder is not None:
            for node in gm.graph.nodes:
                if "source" in node.meta:
                    self._put(f"{node.meta['source'][0]}.py", node.meta["source"][1])

    def note(self, name: str, text: str) -> None:
        """A text beside the graphs: the plan, the versions, the pipeline."""
        emit_artifact(f"autoshard_{name}", lambda: text)
        if self.folder is not None:
            self._put(name, text)

    def _put(self, name: str, text: str, mode: str = "w") -> None:
        assert self.folder is not None
        try:
            with (self.folder / name).open(mode) as file:
                file.write(text)
        except OSError as error:
            raise ConfigError(
                f"dump_dir (or AUTOSHARD_DUMP): {str(self.folder / name)!r} cannot be written ({error.strerror}); legal: a folder with room"
            ) from error
