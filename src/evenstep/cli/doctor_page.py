"""What `evenstep doctor` shows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from evenstep.doctor.judge import gigabits, size

_HOSTS_A_TABLE = 4
_LINKS = 12  # the slowest
_WIDTH = 110  # where there is no terminal

Host = Mapping[str, Any]


def show(report: Mapping[str, Any]) -> None:
    """Print it as tables, then the faults, then the verdict."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=_WIDTH)
    hosts = report["hosts"]
    for first in range(0, len(hosts), _HOSTS_A_TABLE):
        console.print(_hosts(hosts[first : first + _HOSTS_A_TABLE]))
    if report["links"]:
        console.print(_links(report["links"]))
        worst = report["slowest_link"]
        if worst is not None:
            speed = gigabits(worst["bandwidth"])
            console.print(Text(f"the slowest link: {worst['from']} -> {worst['to']}, {speed}"))
    for finding in report["findings"]:
        mark = Text("fails   ", style="bold red") if finding["fails"] else Text("warning ", style="yellow")
        where = f"{finding['where']}: " if finding["where"] else ""
        console.print(mark + Text(f"{where}{finding['what']}\n        what to do: {finding['do']}", style=""))
    failing = sum(finding["fails"] for finding in report["findings"])
    warnings = len(report["findings"]) - failing
    verdict = f"a launch would fail: {_count(failing, 'fault')}" if failing else "a launch would start"
    console.print(Text(", ".join([verdict, *([_count(warnings, "warning")] if warnings else [])]), style="bold"))


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _hosts(hosts: list[Host]) -> Table:
    table = Table(header_style="bold", show_lines=False)
    table.add_column("")
    for host in hosts:
        table.add_column(Text(host["host"]), overflow="fold")
    for name, value in _ROWS.items():
        cells = [value(host) for host in hosts]
        if any(cells):
            table.add_row(Text(name), *map(Text, cells))
    return table


def _links(links: list[Mapping[str, Any]]) -> Table:
    shown = sorted(links, key=lambda link: (link["error"] is None, link["bandwidth"]))[:_LINKS]
    title = None if len(shown) == len(links) else f"the slowest {len(shown)} of {len(links)} links"
    table = Table(header_style="bold", title=title)
    for name in ("from", "to", "there and back", "bandwidth"):
        table.add_column(name)
    for link in shown:
        if link["error"] is None:
            words = (f"{1000 * link['latency']:.2f} ms", gigabits(link["bandwidth"]))
        else:
            words = (f"no connection: {link['error']}", "")
        table.add_row(*map(Text, (link["from"], link["to"], *words)))
    return table


def _torch(host: Host) -> str:
    found = host["torch"]
    if "error" in found:
        return f"{host['same']['torch']}: {found['error']}"
    parts = [f"imported in {found['seconds']:.1f} s"]
    parts += [f"CUDA {found['cuda']}"] if found["cuda"] else ["without CUDA"]
    parts += [f"NCCL {found['nccl']}"] if found["nccl"] else []
    return f"{found['version']} ({', '.join(parts)})"


def _gpus(host: Host) -> str:
    names = host["torch"].get("gpus") or []
    driver = f", driver {host['driver']}" if host["driver"] else ""
    return (f"{len(names)} x {names[0]}" if names else "none") + driver


def _interface(host: Host) -> str:
    names = sorted(set(filter(None, host["interfaces"].values())))
    return f"{', '.join(names)}: {host['why']}" if names else host["why"]


def _disk(host: Host) -> str:
    seen = {True: "; the first host's is seen here", False: "; the first host's is not seen here", None: ""}
    about = f"{host['file_system']}{seen[host['shared']]}"
    return f"{host['folder']} ({about}): {size(host['disk_free'])} free of {size(host['disk'])}"


def _clock(host: Host) -> str:
    clock = host["clock"]
    return f"{clock['before_the_first']:+.3f} s (known to {1000 * clock['error']:.1f} ms)"


def _limits(host: Host) -> str:
    def said(limit: int, of: Callable[[float], str] = str) -> str:
        return "no limit" if limit == -1 else of(limit)

    files, memory = said(host["open_files"]), said(host["locked_memory"], size)
    return f"open files {files}, locked memory {memory}, processes {said(host['user_processes'])}"


_ROWS: dict[str, Callable[[Host], str]] = {
    "processes": lambda host: str(host["processes"]),
    "address": lambda host: str(host["address"]),
    "gloo and NCCL use": _interface,
    "evenstep": lambda host: str(host["same"]["evenstep"]),
    "python": lambda host: str(host["same"]["python"]),
    "torch": _torch,
    "script": lambda host: str(host["same"].get("the script", "")),
    "GPUs": _gpus,
    "processor": lambda host: f"{host['cores']} cores, {host['cpu']}, {host['torch'].get('cpu', '')}",
    "memory": lambda host: f"{size(host['memory_free'])} free of {size(host['memory'])}",
    "shared memory": lambda host: f"{size(host['shared_memory_free'])} free",
    "run directory": _disk,
    "clock": _clock,
    "limits": _limits,
}
