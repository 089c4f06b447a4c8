"""The checks that every test stands under, each shown to fail."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

LEAKS = {
    "variable": ("os.environ['LEFT'] = '1'", "environment variable LEFT='1'"),
    "changed": ("os.environ['HOME'] = '/nowhere'", "environment variable HOME"),
    "thread": ("threading.Thread(target=threading.Event().wait, name='left', daemon=True).start()", "thread left"),
    "child": ("subprocess.Popen(['sleep', '60'])", "sleep 60"),
    "group": ("dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)", "process group"),
    "descriptor": ("os.open('/etc/passwd', os.O_RDONLY)", "-> /etc/passwd"),
    "file": ("open('left.txt', 'w').close()", "file left.txt in the working directory"),
    "cwd": ("os.chdir('/')", "another working directory: /"),
}


def test_each_kind_of_leak_fails_the_test_at_fault_and_no_other(pytester: pytest.Pytester) -> None:
    lines = ["import os, subprocess, threading", "import torch.distributed as dist"]
    for name, (leak, _) in LEAKS.items():
        lines += [f"def test_{name}():", f"    {leak}", f"def test_after_{name}():", "    pass"]
    pytester.makepyfile(test_leaking="\n".join(lines))
    pytester.makeconftest(
        textwrap.dedent(f"""
        import sys
        sys.path.insert(0, {str(Path(__file__).parent.parent)!r})
        import tests.leaks
        from tests.leaks import empty_cwd, nothing_left_behind
        tests.leaks.GRACE = 0.2
        """)
    )
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider", "-W", "ignore", "-v")
    result.assert_outcomes(passed=2 * len(LEAKS), errors=len(LEAKS))
    for name, (_, message) in LEAKS.items():
        result.stdout.fnmatch_lines([f"*ERROR*test_{name}*"])
        assert message in result.stdout.str()


def test_a_clean_test_passes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SET_AND_UNSET", "1")
    (tmp_path / "file").write_text("x")
