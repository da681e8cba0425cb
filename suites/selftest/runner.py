"""GitHub's runner, as far as it reads what a step prints: which commands it carries out."""

from collections.abc import Iterable
from dataclasses import dataclass

_COMMANDS = {
    "add-mask", "add-matcher", "add-path", "debug", "echo", "endgroup", "error", "group", "notice",
    "remove-matcher", "save-state", "set-env", "set-output", "stop-commands", "warning",
}  # fmt: skip


@dataclass(frozen=True)
class Command:
    """One command: its name, its properties and what follows them."""

    name: str
    properties: dict[str, str]
    data: str


def carried_out(lines: Iterable[str]) -> list[Command]:
    """Give the commands that the runner takes from lines, those apart that stop and resume it."""
    known, resume, found = set(_COMMANDS), None, []
    for line in lines:
        command = _command(line, known)
        if command is None:
            continue
        if resume is not None:
            if command.name == resume:
                known.remove(resume)
                resume = None
        elif command.name == "stop-commands":
            resume = command.data
            known.add(resume)
        else:
            found.append(command)
    return found


def _command(line: str, known: set[str]) -> Command | None:
    """Read a line: "::name …::data" after blanks, or the older "##[name …]data" anywhere."""
    stripped = line.lstrip()
    if stripped.startswith("::") and "::" in stripped[2:]:
        info, _, data = stripped[2:].partition("::")
        if info.partition(" ")[0] in known:
            return _read(info, data, ",", {"%0D": "\r", "%0A": "\n", "%3A": ":", "%2C": ","})
    if "##[" in line and "]" in line.partition("##[")[2]:
        info, _, data = line.partition("##[")[2].partition("]")
        if info.partition(" ")[0] in known:
            return _read(info, data, ";", {"%3B": ";", "%0D": "\r", "%0A": "\n", "%5D": "]"})
    return None


def _read(info: str, data: str, separator: str, escapes: dict[str, str]) -> Command:
    name, _, given = info.partition(" ")
    pairs = [each.partition("=") for each in given.strip().split(separator)]
    properties = {key: _plain(value, escapes) for key, _, value in pairs if value}
    return Command(name, properties, _plain(data, {"%0D": "\r", "%0A": "\n"}))


def _plain(text: str, escapes: dict[str, str]) -> str:
    for escape, meant in (escapes | {"%25": "%"}).items():
        text = text.replace(escape, meant)
    return text
