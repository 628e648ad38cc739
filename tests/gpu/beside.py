#!/usr/bin/env python3
"""Runs unittest's tests in several processes beside each other: most of them wait for the host, not for the GPU.

    tests/gpu/beside.py [--jobs 4] [--pattern 'test*.py'] [-k PART]... [--under COMMAND]

A process takes a test whenever it is done with one. -k: only tests whose name has PART in it. --under: a command to start processes
with, compute-sanitizer say; one that ends with another status than 0 has failed. Exit status 1 if anything failed."""

import argparse
import collections
import os
import pathlib
import shlex
import subprocess
import sys
import tempfile
import threading
import time
import unittest
from multiprocessing.connection import Client, Listener

HERE = pathlib.Path(__file__).resolve().parent


def flat(tests):
    for test in tests:
        yield from flat(test) if isinstance(test, unittest.TestSuite) else [test]


def run(test):
    """(what became of it, what is to be said about it)"""
    result = unittest.TestResult()
    unittest.TestSuite([test]).run(result)
    wrong = result.failures + result.errors
    if wrong or result.unexpectedSuccesses:
        return "FAILED", "\n".join(f"{where}\n{text}" for where, text in wrong) or "it passed, which was not expected"
    return ("skipped", result.skipped[0][1]) if result.skipped else ("ok", "")


def work(address):
    """A process that takes tests: their names come, and what became of them goes back."""
    with Client(address) as line:
        while name := line.recv():
            line.send(run(unittest.defaultTestLoader.loadTestsFromName(name)))


class Team:
    def __init__(self, under):
        self.waiting, self.under = collections.deque(), under
        self.lock, self.counts, self.said = threading.Lock(), collections.Counter(), []

    def note(self, name, seconds, became, text):
        with self.lock:
            self.counts[became] += 1
            print(f"{became:8s}{seconds:6.1f} s  {name}{': ' + text if became == 'skipped' else ''}", flush=True)
            if became == "FAILED":
                self.said.append(f"{'=' * 70}\n{name}\n{text}")

    def take(self):
        with self.lock:
            return self.waiting.popleft() if self.waiting else None

    def member(self):
        """Tests for one process, and for another if that one ends before its time."""
        name = self.take()
        while name:
            name = self.employ(name)

    def employ(self, name):
        """Gives tests to a process, this one first. The next test, if the process ended too early."""
        with tempfile.TemporaryDirectory() as folder, open(os.path.join(folder, "said"), "w+") as said:
            address = os.path.join(folder, "line")
            with Listener(address, "AF_UNIX") as listener:
                command = [*self.under, sys.executable, __file__, "--work-for", address]
                process = subprocess.Popen(command, stdout=said, stderr=subprocess.STDOUT)
                threading.Thread(target=self.watch, args=(process, address), daemon=True).start()
                line = listener.accept()
            start = time.monotonic()
            try:
                while name:
                    start = time.monotonic()
                    line.send(name)
                    became, text = line.recv()
                    self.note(name, time.monotonic() - start, became, text)
                    name = self.take()
                line.send(None)
            except (EOFError, OSError):
                said.seek(0)
                text = f"its process ended with status {process.wait()}:\n{said.read()[-8000:]}"
                self.note(name, time.monotonic() - start, "FAILED", text)
                return self.take()
            if process.wait() != 0:
                said.seek(0)
                self.note(" ".join(self.under) or "a process", 0, "FAILED", f"status {process.returncode}:\n{said.read()[-8000:]}")
        return None

    @staticmethod
    def watch(process, address):
        """A process that ends before it has called leaves nobody waiting for it."""
        process.wait()
        try:
            Client(address).close()
        except OSError:
            pass  # it did call


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=4)
    parser.add_argument("--pattern", default="test*.py")
    parser.add_argument("-k", action="append", default=[], metavar="PART", dest="parts")
    parser.add_argument("--under", default="", metavar="COMMAND")
    parser.add_argument("--work-for", help=argparse.SUPPRESS)
    wanted = parser.parse_args()
    sys.path.insert(0, str(HERE))
    if wanted.work_for:
        work(wanted.work_for)
        return 0
    team = Team(shlex.split(wanted.under))
    for test in flat(unittest.defaultTestLoader.discover(str(HERE), wanted.pattern)):
        if type(test).__module__.startswith("unittest"):  # a file that could not be loaded, or does not want to be
            became, text = run(test)
            team.note(test.id(), 0, became, text)
            if became == "skipped":
                print(f"skipped: {text}")
        elif not wanted.parts or any(part in test.id() for part in wanted.parts):
            team.waiting.append(test.id())
    if not team.waiting and not team.counts:
        print("no test has such a name")
        return 1
    start = time.monotonic()
    members = [threading.Thread(target=team.member) for _ in range(min(wanted.jobs, len(team.waiting)))]
    for member in members:
        member.start()
    for member in members:
        member.join()
    print("\n".join(team.said))
    counts = team.counts
    print(f"{time.monotonic() - start:.0f} s: {counts['ok']} passed, {counts['FAILED']} failed, {counts['skipped']} skipped")
    return 1 if counts["FAILED"] else 0


if __name__ == "__main__":
    sys.exit(main())
