"""tools/examples/gradient-compression, run as its users run it, and with what may go wrong.

check_gradient_compression.py mpi  PROGRAM                            1 to 4 ranks under mpirun; a NaN; a rank that is killed
check_gradient_compression.py ddp  FOLDER LIBRARY OTHER_VERSION       the hook under torchrun, likewise; libraries of other kinds
check_gradient_compression.py skip MESSAGE

Exits with 77, which Meson counts as skipped, where there is nothing to test.
"""
import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time

sys.dont_write_bytecode = True
sys.path.insert(0, os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), 'multirank'))
from ranks import Process, end_in_order, running

TIMEOUT = 10


def skip(message):
    print('skipped:', message)
    sys.exit(77)


def check(holds, what):
    if not holds:
        raise AssertionError(what)


def check_report(output, ranks):
    """What both examples print of bytes."""
    found = {name: int(number) for name, number in re.findall(r'^  (FP\S+ by \S+) +(\d+) ', output, re.M)}
    elements = int(re.search(r'for (\d+) gradients', output)[1])
    ideal = 2 * (ranks - 1) / ranks * elements
    fp8, fp32 = found['FP8 by libfp8comm'], found['FP32 by libfp8comm']
    check(ideal <= fp8 <= 1.05 * ideal, f'FP8 took {fp8} bytes on {ranks} ranks, expected {ideal:.0f} and at most 5 % more')
    check(4 * ideal <= fp32 <= 4.2 * ideal, f'FP32 took {fp32} bytes on {ranks} ranks, expected {4 * ideal:.0f} and at most 5 % more')
    print(f'{ranks} ranks: {fp8} bytes, FP32 {fp32};', re.search(r'.*part.*at most.*', output)[0])


# ---- MPI

def mpirun(*words):
    # Ranks wait for each other without keeping others from the cores.
    settings = {'OMPI_MCA_mpi_yield_when_idle': '1', 'OMPI_MCA_hwloc_base_binding_policy': 'none',
                # Containers may not let processes read each other's memory, of which Open MPI would complain.
                'OMPI_MCA_btl_vader_single_copy_mechanism': 'none',
                # What Open MPI itself leaks at the end is not this project's.
                'ASAN_OPTIONS': os.environ.get('ASAN_OPTIONS', '') + ':detect_leaks=0'}
    return Process(['mpirun', *(OPEN_MPI_FLAGS if OPEN_MPI else []), *words], launcher=True, **settings)


OPEN_MPI_FLAGS = ['--allow-run-as-root', '--oversubscribe']
OPEN_MPI = None


def pids_of_rank(path, rank):
    for pid in filter(str.isdigit, os.listdir('/proc')):
        with contextlib.suppress(OSError), open(f'/proc/{pid}/environ', 'rb') as file:
            if os.path.realpath(f'/proc/{pid}/exe') == os.path.realpath(path) and f'OMPI_COMM_WORLD_RANK={rank}'.encode() in file.read().split(b'\0'):
                yield int(pid)


def check_mpi(path):
    global OPEN_MPI
    if not shutil.which('mpirun'):
        skip('no mpirun here; Debian: openmpi-bin')
    version = subprocess.run(['mpirun', '--version'], capture_output=True, text=True, check=True).stdout
    OPEN_MPI = re.search(r'Open MPI\D*(\d+)', version)
    for ranks in 1, 2, 3, 4:
        with mpirun('-n', ranks, path, '--steps', 200) as started:
            code, output, errors = started.finish()
            check(code == 0, (code, output, errors))
            check_report(output, ranks)
    # Every rank is told which one it was, and training goes on.
    with mpirun('-n', 3, path, '--steps', 100, '--nan', 1, 70) as started:
        code, output, errors = started.finish()
        check(code == 0, (code, output, errors))
        for rank in range(3):
            check(f'rank {rank}: step 70: the gradient of hidden.weight is not finite on rank 1; step skipped' in errors, errors)
    for words, message in ((('--steps', '60'), '--steps is 60, expected a multiple of 50'), (('--nan', '2', '1'), 'the rank of --nan is "2"'),
                           (('--steps', '100', '--nan', '1', '100'), 'the step of --nan is 100, expected less than --steps, 100'),
                           (('--timeout', '0'), '--timeout is "0", expected a number from'), (('--step', '1'), '"--step" is unknown')):
        with mpirun('-n', 2, path, *words) as started:
            code, output, errors = started.finish()
            check(code == 2 and message in errors, (code, output, errors))
    if OPEN_MPI and OPEN_MPI[1] == '4':
        check_killed(path)
    else:
        print(f'not tested: whether a rank is told of a killed one, as this mpirun ends the others itself: {version.strip()}')


def check_killed(path):
    for ranks, victim in (2, 1), (3, 0):
        # Without this, mpirun ends the others before they can speak.
        with mpirun('--enable-recovery', '-n', ranks, path, '--steps', 1500, '--timeout', TIMEOUT) as started:
            # From here on nothing goes by way of MPI, which would hang.
            if victim == 0:
                started.wait_for(r'^    50 ')
            else:
                started.wait_for(r'^ steps ')
            begun = time.monotonic()
            pids = list(pids_of_rank(path, victim))
            check(len(pids) == 1, pids)
            os.kill(pids[0], signal.SIGKILL)
            _, output, errors = started.finish()
            took = time.monotonic() - begun
            check(re.search(rf'^rank \d: peer failure: rank {victim} is gone', errors, re.M), (output, errors))
            check(took < TIMEOUT, f'took {took:.1f} s')
            print(f'rank {victim} of {ranks} killed: told within {took:.1f} s')


# ---- PyTorch

# No files beside the sources.
PYTHON = {'PYTHONDONTWRITEBYTECODE': '1'}


def check_torchrun(script, library):
    # Of four ranks on a busy machine one used to abort after its work, in many runs.
    for ranks, steps in (2, 100), (4, 25):
        with Process([sys.executable, '-m', 'torch.distributed.run', '--standalone', '--nproc-per-node', ranks, script, library,
                      '--steps', steps], launcher=True, OMP_NUM_THREADS=1, **PYTHON) as started:
            code, output, errors = started.finish()
        check(code == 0, (code, output, errors))
        check_report(output, ranks)
        made, buckets = map(int, re.search(r'(\d+) reducers made for (\d+) buckets', output).groups())
        check(made > buckets > 1, f'{made} reducers for {buckets} buckets: buckets that change were not tested')


def check_faults(script, library):
    """A NaN, of which both ranks are told; then a rank is killed."""
    command = [sys.executable, script, library, '--steps', 75, '--nan', 1, 10, '--timeout', TIMEOUT]
    with running([command] * 2, **PYTHON) as ranks:
        for rank, one in enumerate(ranks):
            one.wait_for(rf'^rank {rank}: step 10: \d+ gradients are not finite on rank 1; step skipped')
        begun = time.monotonic()
        ranks[1].process.kill()
        code, output, errors = ranks[0].finish()
        took = time.monotonic() - begun
        check(code == 1 and re.search('libfp8comm: rank 1 is gone', errors), (code, output, errors))
        check(took < TIMEOUT + 5, f'took {took:.1f} s')
        print(f'rank 1 of 2 killed: told within {took:.1f} s')


def check_libraries(fp8comm, other_version):
    for path, pattern in (('/nonexistent/libfp8comm.so', 'cannot load /nonexistent/libfp8comm.so: .*set FP8COMM_LIBRARY'),
                          ('libm.so.6', r'libm.so.6 has no fp8core_api_version\(\), expected libfp8comm'),
                          (other_version, 'comes with libfp8comm of API version 1, expected 0')):
        expect(OSError, pattern, fp8comm.load_library, path)


def expect(kind, pattern, call, *arguments, **keywords):
    try:
        call(*arguments, **keywords)
    except kind as error:
        check(re.search(pattern, str(error)), f'{error!r} does not match {pattern!r}')
        return error
    raise AssertionError(f'no {kind.__name__} of {pattern!r}')


def check_bindings(fp8comm, library):
    """What needs no second rank."""
    import torch

    loaded = fp8comm.load_library(library)
    expect(fp8comm.Error, 'timeout_seconds is -1, expected a number above 0', fp8comm.Communicator, 0, 1, None, -1.0, loaded)
    expect(fp8comm.Error, 'rank is 2, expected 0 to 1', fp8comm.Communicator, 2, 2, lambda part: [part, part], library=loaded)
    expect(fp8comm.Error, 'all_gather is NULL', fp8comm.Communicator, 0, 2, library=loaded)

    def fail(_):
        raise KeyError('no store')

    error = expect(fp8comm.Error, 'all_gather returned 1', fp8comm.Communicator, 0, 2, fail, library=loaded)
    check(isinstance(error.__cause__, KeyError), error.__cause__)
    error = expect(fp8comm.Error, 'all_gather returned 1', fp8comm.Communicator, 0, 2, lambda part: [part], library=loaded)
    check('of each of 2 ranks' in str(error.__cause__), error.__cause__)
    expect(fp8comm.Error, 'threads is -3', fp8comm.Context, -3, loaded)

    alone, context = fp8comm.Communicator(0, 1, library=loaded), fp8comm.Context(1, loaded)
    expect(ValueError, "algorithm is 'ring', expected one of two-shot", fp8comm.Reducer, alone, context, [3], algorithm='ring')
    expect(fp8comm.Error, 'backoff', fp8comm.Reducer, alone, context, [3], backoff=2.0)
    values = torch.randn(1000, generator=torch.Generator().manual_seed(1))
    reducer = fp8comm.Reducer(alone, context, [1000, 10], measure_snr=True)
    expect(ValueError, r'tensors have \[1000\] elements', reducer.all_reduce, [values])
    expect(ValueError, 'torch.float64 on cpu', reducer.all_reduce, [values.double(), values[:10]])
    for dtype in torch.float32, torch.bfloat16, torch.float16:
        mean, nothing = values.to(dtype, copy=True), torch.zeros(10, dtype=dtype)
        check(reducer.all_reduce([mean, nothing]).nonfinite_tensors == 0, dtype)
        check(not torch.equal(mean, values.to(dtype)) and torch.allclose(mean.float(), values, rtol=1 / 8, atol=0.01), dtype)
        check(reducer.statistics()[0].snr_db > 25 and not nothing.any(), dtype)
    # The factors go on from where they were saved.
    other = fp8comm.Reducer(alone, context, [1000, 10])
    other.load(reducer.save())
    other.all_reduce([values.clone(), torch.zeros(10)])
    check(other.statistics()[0].mu == reducer.statistics()[0].next_mu != 1, 'mu')
    expect(fp8comm.Error, 'checksum', other.load, reducer.save()[:-1])
    reducer.close()
    alone.close()
    expect(ValueError, 'the communicator is closed', fp8comm.Reducer, alone, context, [3])

    torch.distributed.init_process_group('gloo', rank=0, world_size=1, store=torch.distributed.HashStore())
    states, saved = [], None
    for _ in range(2):
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
        state = fp8comm.HookState(library=loaded)
        if saved:
            state.load_state_dict(saved)
        model.register_comm_hook(state, fp8comm.fp8_compress_hook)
        for _ in range(3):
            model(torch.ones(2, 8)).square().sum().backward()
        report = state.report()
        check((report.buckets, report.elements, report.nonfinite_tensors) == (3, 3 * 72, 0), report)
        saved = state.state_dict()
        states.append(state)
    # Buckets are packed anew after the first step, so that the factors are taken in the second and have grown once in the third.
    first, second = (state._reducers[0].statistics()[0] for state in states)
    check(first.mu > 1 and abs(second.mu / first.next_mu - 2 ** (1 / 1000)) < 1e-9, (first.next_mu, second.mu))
    # A bucket that the library does not take.
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8).double())
    model.register_comm_hook(states[0], fp8comm.fp8_compress_hook)
    expect(RuntimeError, 'a gradient is torch.float64 on cpu, expected FP32', model(torch.ones(2, 8).double()).sum().backward)
    for state in states:
        state.close()
    torch.distributed.destroy_process_group()


def check_ddp(folder, library, other_version):
    sys.path.insert(0, folder)
    try:
        import fp8comm
    except ImportError as missing:
        skip(f'{missing}; pip install torch')
    script = os.path.join(folder, 'train_ddp.py')
    check_libraries(fp8comm, other_version)
    check_bindings(fp8comm, library)
    check_torchrun(script, library)
    check_faults(script, library)


if __name__ == '__main__':
    end_in_order()
    {'mpi': check_mpi, 'ddp': check_ddp, 'skip': skip}[sys.argv[1]](*sys.argv[2:])
