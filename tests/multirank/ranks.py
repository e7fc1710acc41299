"""Processes of tests, above all the ranks of a run on this machine. None outlives the block that starts it, nor this
program; no wait is endless; where a block fails, what its processes printed is shown."""
import contextlib
import ctypes
import os
import re
import signal
import socket
import subprocess
import tempfile
import time

# With what may hang. Generous, as other work shares the machine, and below what Meson gives a test.
PATIENCE = 240
# None of ours, and none of a launcher around this test.
CLEANED = re.compile(r'^((LOCAL_)?RANK|WORLD_SIZE|MASTER_(ADDR|PORT)|FP8COMM_.*|FP8CORE_LIBRARY|'
                     r'MPI_LOCALRANKID|(PMIX|OMPI|TORCHELASTIC|UCX|SLURM)_.*)$')
prctl = ctypes.CDLL(None).prctl


def clean_environment(**extra):
    """This program's, with more; None leaves a variable out."""
    environment = {name: value for name, value in os.environ.items() if not CLEANED.match(name)}
    # In builds with sanitizers.
    suppressions = os.path.join(os.path.dirname(os.path.abspath(__file__)), 'lsan.supp')
    environment.setdefault('LSAN_OPTIONS', f'print_suppressions=0:suppressions={suppressions}')
    environment.update({name: str(value) for name, value in extra.items() if value is not None})
    return environment


def free_ports(count, host='127.0.0.1'):
    with contextlib.ExitStack() as stack:
        family = socket.AF_INET6 if ':' in host else socket.AF_INET
        probes = [stack.enter_context(socket.socket(family)) for _ in range(count)]
        for probe in probes:
            probe.bind((host, 0))
        return [probe.getsockname()[1] for probe in probes]


def free_port(host='127.0.0.1'):
    return free_ports(1, host)[0]


def end_in_order():
    """Told to end, as by Meson, a test says what its processes printed, and takes down what it made."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)


def end_with_parent(number=signal.SIGKILL):
    """In a child: also where this program is killed."""
    prctl(1, number)    # PR_SET_PDEATHSIG


class Process:
    """Its output goes to files, so that it never waits for its reader. A launcher gets a session of its own, whose
    processes end with it."""

    def __init__(self, command, folder=None, launcher=False, **environment):
        self.name = f'rank {environment["RANK"]}' if 'RANK' in environment else command[0]
        self.launcher = launcher
        self.files = tempfile.TemporaryFile(), tempfile.TemporaryFile()
        self.process = subprocess.Popen(
            [str(word) for word in command], cwd=folder, env=clean_environment(**environment), stdin=subprocess.DEVNULL,
            stdout=self.files[0], stderr=self.files[1], start_new_session=launcher,
            # A launcher takes its ranks with it only where it is asked to end.
            preexec_fn=lambda: end_with_parent(signal.SIGTERM if launcher else signal.SIGKILL))

    def __enter__(self):
        return self

    def __exit__(self, failed, *_):
        if failed:
            print(f'{self.name}, exit code {self.process.poll()}:\n{"".join(self.text())}', flush=True)
        self.close()

    def close(self):
        if self.launcher:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
        elif self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        for file in self.files:
            file.close()

    def text(self):
        """Output and errors so far; pread() leaves the offset, which is the process's own, where it is."""
        return tuple(os.pread(file.fileno(), 1 << 24, 0).decode(errors='replace') for file in self.files)

    def wait_for(self, pattern):
        """Until it is found in the output, where ^ begins a line."""
        deadline = time.monotonic() + PATIENCE
        while True:
            ended = self.process.poll() is not None
            if re.search(pattern, self.text()[0], re.M):
                return
            assert not ended and time.monotonic() < deadline, \
                f'{self.name} {"ended" if ended else "hangs"} without "{pattern}": {self.text()}'
            time.sleep(0.02)

    def wait_until_it_catches(self, number):
        """Until the process has a handler of its own for this signal."""
        deadline = time.monotonic() + PATIENCE
        while self.process.poll() is None and time.monotonic() < deadline:
            with open(f'/proc/{self.process.pid}/status') as status:
                caught = re.search(r'^SigCgt:\s*([0-9a-f]+)$', status.read(), re.M)
            if caught and int(caught[1], 16) >> (number - 1) & 1:
                return
            time.sleep(0.02)
        raise AssertionError(f'{self.name} does not catch {signal.Signals(number).name}: {self.text()}')

    def finish(self, patience=PATIENCE):
        """Exit code, output, errors."""
        try:
            code = self.process.wait(patience)
        except subprocess.TimeoutExpired:
            raise AssertionError(f'{self.name} hangs: {self.text()}') from None
        return (code, *self.text())


@contextlib.contextmanager
def running(commands, folders=None, host='127.0.0.1', port=None, settings=None, **environment):
    """The ranks of a run, with torchrun's variables: a command's place is its rank, and None is a rank that does not
    come. `settings` has variables of single ranks."""
    run = {'WORLD_SIZE': len(commands), 'MASTER_ADDR': host, **environment,
           'MASTER_PORT': port or free_port(host if host[0].isdigit() or ':' in host else '127.0.0.1')}
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(Process(command, folders and folders[rank],
                                           **{**run, 'RANK': rank, **(settings or {}).get(rank, {})}))
               for rank, command in enumerate(commands) if command is not None]


def finish(started, patience=PATIENCE):
    """Exit code, output and errors of each."""
    return [one.finish(patience) for one in started]


def finish_train(test, started, expect):
    """What finish() gives, of ranks of `fp8lm train` that all end with this exit code."""
    ends = finish(started)
    for code, _, _ in ends:
        test.assertEqual(code, expect)
    if expect == 0:
        # Rank 0 speaks for all.
        for _, out, errors in ends[1:]:
            test.assertEqual((out, errors), ("", ""))
    return ends
