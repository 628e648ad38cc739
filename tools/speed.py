"""The part of tools/speed.sh that calls: two programs of tools/speed.c in turns."""

import statistics
import subprocess
import sys


class Version:
    def __init__(self, program):
        self.process = subprocess.Popen([program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)
        self.names = list(iter(self.line, "."))

    def line(self):
        text = self.process.stdout.readline()
        if not text:
            sys.exit(f"speed.sh: {self.process.args[0]} ended with status {self.process.wait()}")
        return text.strip()

    def call(self, problem):
        """Milliseconds forward and backward."""
        self.process.stdin.write(f"{problem}\n")
        return [float(word) for word in self.line().split()]


def main():
    *programs, calls = sys.argv[1:]
    versions = [Version(program) for program in programs]
    print("| problem | pass | base: least, median ms | this tree | base / this tree: least | median |")
    print("| --- | --- | --- | --- | --- | --- |")
    for problem, name in enumerate(versions[0].names):
        for version in versions:
            version.call(problem)
        times = [[], []]
        for turn in range(int(calls)):  # whoever goes first finds the caches as the other left them
            for which in (0, 1) if turn % 2 else (1, 0):
                times[which].append(versions[which].call(problem))
        for number, which in enumerate(("forward", "backward")):
            least, median = ([kind([call[number] for call in of]) for of in times] for kind in (min, statistics.median))
            both = [f"{a:.2f}, {b:.2f}" for a, b in zip(least, median)]
            ratios = [f"{base / head:.3f}" for base, head in (least, median)]
            print("|", " | ".join([name, which, *both, *ratios]), "|", flush=True)


main()
