"""The cluster, through the user's own kubectl: create manifests, follow node 0's log, tell how it ended."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from evenstep.errors import MachineError, UsageError
from evenstep.launch.schedulers.kubernetes import Asked, manifests, to_yaml

_LOOK_EVERY = 0.5  # seconds
_SAY_AFTER = 10.0  # seconds for which a pod may wait without a word

Say = Callable[[str], None]
Found = dict[str, Any]


class Cluster:
    """What kubectl reaches: its current context."""

    def __init__(self, asked: Asked, say: Say) -> None:
        if shutil.which("kubectl") is None:
            raise UsageError(
                "there is no kubectl on this machine, which gives manifests to the cluster",
                do="install it, or print the manifests with --dry-run, for `kubectl create -f` elsewhere",
            )
        self._asked, self._say = asked, say

    def create(self) -> None:
        """Create all, or nothing. MachineError with kubectl's own words."""
        done = self._kubectl("create", "--output=name", "--filename=-", text=to_yaml(manifests(self._asked)))
        if done.returncode != 0:
            made = done.stdout.split()
            if made:
                self._kubectl("delete", "--ignore-not-found", *made)
            raise MachineError(
                f"kubectl did not take the manifests:\n{done.stderr.strip()}",
                do="see `kubectl config current-context` and what you may do there (`kubectl auth can-i create jobs`)",
            )

    def follow(self) -> tuple[str | None, int | None]:
        """Show node 0's log, of each of its pods in turn, until the run has ended.

        Why it failed (None: it did not), and the exit code of node 0 where that is known.
        """
        shown: set[str] = set()
        since = time.monotonic()
        code: int | None = None
        while True:
            ended, why = self._ended()
            pods = self._pods()
            new = [pod for pod in pods if _name(pod) not in shown and pod["status"].get("phase") != "Pending"]
            if new:
                shown.add(_name(new[0]))
                code = self._show(_name(new[0]))
                since = time.monotonic()
            elif ended:
                return why, code
            else:
                if pods and time.monotonic() > since + _SAY_AFTER:
                    self._say(f"waiting for {_name(pods[-1])}: {_why_pending(pods[-1])}")
                    since = time.monotonic()
                time.sleep(_LOOK_EVERY)

    def _show(self, pod: str) -> int | None:
        """Its log to the end; its exit code."""
        self._say(f"the log of node 0, pod {pod}:")
        sys.stdout.flush()
        again: tuple[str, ...] = ()
        while True:
            subprocess.run(["kubectl", "logs", "--follow", *again, pod, *self._namespace()], stdin=subprocess.DEVNULL)
            found = self._get("pod", pod)
            status = found["status"] if found else {}
            if status.get("phase") != "Running":
                states = [one.get("state", {}).get("terminated", {}) for one in status.get("containerStatuses", [])]
                return next((state["exitCode"] for state in states if "exitCode" in state), None)
            again = ("--since=5s",)  # the connection was cut, or the container starts again
            time.sleep(_LOOK_EVERY)

    def _ended(self) -> tuple[bool, str | None]:
        """Whether the whole run has, and why it failed."""
        found = self._get(*self._asked.resource.split("/"))
        if found is None:
            return True, f"{self._asked.resource} was deleted"
        for condition in found.get("status", {}).get("conditions", []):
            if condition.get("status") == "True":
                if condition["type"] in ("Complete", "Succeeded"):
                    return True, None
                if condition["type"] == "Failed":
                    return True, ": ".join(filter(None, (condition.get("reason"), condition.get("message"))))
        return False, None

    def _pods(self) -> list[Found]:
        """Node 0's, the oldest first."""
        labels = ",".join(f"{key}={value}" for key, value in self._asked.node_0.items())
        done = self._kubectl("get", "pods", "--output=json", f"--selector={labels}")
        if done.returncode != 0:
            raise MachineError(f"kubectl: {done.stderr.strip()}", do=self._later())
        found: list[Found] = json.loads(done.stdout)["items"]
        return sorted(found, key=lambda pod: str(pod["metadata"].get("creationTimestamp")))

    def _get(self, kind: str, name: str) -> Found | None:
        done = self._kubectl("get", kind, name, "--output=json", "--ignore-not-found")
        if done.returncode != 0:
            raise MachineError(f"kubectl: {done.stderr.strip()}", do=self._later())
        found: Found | None = json.loads(done.stdout) if done.stdout.strip() else None
        return found

    def _later(self) -> str:
        return f"the run goes on in the cluster: kubectl get {self._asked.everything}"

    def _namespace(self) -> list[str]:
        return [f"--namespace={self._asked.namespace}"] if self._asked.namespace else []

    def _kubectl(self, *words: str, text: str | None = None) -> subprocess.CompletedProcess[str]:
        # The manifests, which have the token, go in by a pipe.
        given: dict[str, Any] = {"stdin": subprocess.DEVNULL} if text is None else {"input": text}
        return subprocess.run(["kubectl", *words, *self._namespace()], capture_output=True, text=True, **given)


def _name(pod: Found) -> str:
    return str(pod["metadata"]["name"])


def _why_pending(pod: Found) -> str:
    """What the cluster says of a pod that has not started."""
    for one in pod["status"].get("containerStatuses", []):
        waiting = one.get("state", {}).get("waiting", {})
        if waiting.get("reason"):
            return ": ".join(filter(None, (waiting["reason"], waiting.get("message"))))
    for condition in pod["status"].get("conditions", []):
        if condition.get("status") == "False" and condition.get("message"):
            return str(condition["message"])
    return "it has not started"
