"""`evenstep run --kubernetes`: its options, and what they become."""

from __future__ import annotations

import os
import re
import secrets
from pathlib import Path

import click

from evenstep.cli import exits, preflight
from evenstep.cli.elsewhere import Elsewhere
from evenstep.cli.options import given_options
from evenstep.cli.report import say
from evenstep.environment import TOKEN
from evenstep.errors import UsageError
from evenstep.launch.schedulers.kubectl import Cluster
from evenstep.launch.schedulers.kubernetes import KINDS, Asked, manifests, to_yaml

# Options of run that the manifests say in their own way.
_SAID = {"nodes", "processes", "run_directory", "master_port", "dry_run"}

_KUBERNETES = Elsewhere(
    "--kubernetes",
    refused=("node_rank", "master_addr", "hosts", "hostfile", "min_hosts", "standalone"),
    why=", which says to each pod where it stands",
)
_option = _KUBERNETES.option
_option(
    "--kubernetes",
    is_flag=True,
    help="Run in a Kubernetes cluster, by kubectl: a pod for each of --nodes (1 without it).",
)
_option("--image", metavar="IMG", help="Needed with --kubernetes: the container image. It has evenstep and the script.")
_option(
    "--mount-script",
    is_flag=True,
    help="With --kubernetes: the script, one file, is taken from here (a ConfigMap); without it, from the image.",
)
_option(
    "--gpus",
    type=click.IntRange(min=1),
    metavar="N",
    show_default="none",
    help="With --kubernetes: GPUs of each pod, with a process for each.",
)
_option(
    "--claim",
    metavar="CLAIM",
    help="With --kubernetes: PersistentVolumeClaim for the run directory, that all pods can write; without it "
    "all is lost with the pods.",
)
_option(
    "--volume",
    multiple=True,
    metavar="CLAIM:PATH",
    show_default="none",
    help="With --kubernetes: another one, with data; may be repeated.",
)
_option(
    "--name", metavar="NAME", show_default="the script's, and a random end", help="With --kubernetes: the job's name."
)
_option("--namespace", metavar="NS", show_default="kubectl's", help="With --kubernetes: where it is created.")
_option(
    "--kind", type=click.Choice(KINDS), default="job", show_default=True, help="With --kubernetes: what runs the pods."
)
_option(
    "--secret",
    metavar="NAME",
    show_default="a new one",
    help="With --kubernetes: a Secret with the run's token (key: token).",
)
_option(
    "--grace",
    type=click.IntRange(min=1),
    default=120,
    metavar="S",
    show_default=True,
    help="With --kubernetes: seconds that an evicted pod has for its step and checkpoint.",
)
options, is_asked = _KUBERNETES.options, _KUBERNETES.is_asked


def launch() -> int:
    """Print the manifests, or create them and follow the run."""
    ctx = click.get_current_context()
    asked = _asked(ctx)
    if asked.claim is None:
        say("no --claim: checkpoints, logs and the model are lost with the pods")
    if ctx.params["dry_run"]:
        click.echo(to_yaml(manifests(asked)), nl=False)
        if asked.token is not None:
            say("these manifests hold the run's token: keep them as you keep passwords, or name a --secret")
        return exits.DONE
    cluster = Cluster(asked, say)
    cluster.create()
    say(f"created {asked.resource}; to stop it and remove all of it: kubectl delete {asked.everything}")
    try:
        why, code = cluster.follow()
    except KeyboardInterrupt:
        say("it goes on in the cluster")
        return exits.by_signal(2)
    if why is None:
        say(f"{asked.resource} is done; its run directory: {asked.directory}")
        return exits.DONE
    say(f"{asked.resource} failed: {why}")
    return code if code in (exits.SCRIPT_FAILED, exits.WRONG_USAGE) else exits.MACHINE_FAILED


def _asked(ctx: click.Context) -> Asked:
    params, given = ctx.params, _KUBERNETES.said
    _KUBERNETES.refuse_others()
    if not given["image"]:
        raise UsageError("--kubernetes needs --image", do="name an image that has evenstep, torch and the script")
    script = str(params["script"])
    gpus = given["gpus"] or 0
    name = given["name"]
    return Asked(
        kind=given["kind"],
        name=_default_name(script) if name is None else name,
        image=given["image"],
        options=tuple(given_options(ctx, without=_SAID)),
        script=script,
        arguments=params["arguments"],
        nodes=preflight.one_number(params["nodes"], "--kubernetes"),
        processes=params["processes"] or max(1, gpus),
        gpus=gpus,
        port=params["master_port"] or 29500,
        namespace=given["namespace"],
        run=params["run_directory"],
        claim=given["claim"],
        volumes=tuple(map(_volume, given["volume"])),
        text=_text(script, params["as_module"]) if given["mount_script"] else None,
        token=None if given["secret"] else os.environ.get(TOKEN) or secrets.token_urlsafe(24),
        secret=given["secret"],
        grace=given["grace"],
    )


def _text(script: str, as_module: bool) -> str:
    """The script's own."""
    if as_module:
        raise UsageError("--mount-script takes a script, not a module", do="copy the module into the image")
    preflight.check_script(script)
    try:
        return Path(script).read_text(encoding="utf-8")
    except (IsADirectoryError, UnicodeDecodeError):
        raise UsageError(
            f"--mount-script takes one file of text, and {script} is not", do="copy it into the image"
        ) from None


def _volume(text: str) -> tuple[str, str]:
    claim, colon, path = text.partition(":")
    if not claim or not colon or not path.startswith("/"):
        raise UsageError(f"--volume {text!r} is no claim with its place in the container", do="as in data:/data")
    return claim, path


def _default_name(script: str) -> str:
    stem = re.sub(r"[^a-z0-9]+", "-", Path(script).stem.lower()).strip("-")[:24].strip("-")
    return f"{stem if stem[:1].isalpha() else 'run'}-{secrets.token_hex(3)}"
