"""A Slurm of one node for the time of a test: munged, slurmctld and slurmd of the user who runs it, in a folder that is
removed afterwards, listening on loopback. Nothing of a Slurm that the machine may have is read or touched."""
import contextlib
import os
import pwd
import random
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import time

from ranks import end_with_parent, free_ports

PATIENCE = 60
# Debian's folder of daemons is not in every user's PATH.
PATH = os.pathsep.join([os.environ.get('PATH', os.defpath), '/usr/local/sbin', '/usr/sbin'])
# Addresses only (CommunicationParameters); no control groups, accounts or bindings. As many processors as a test wants.
# Jobs begin anywhere (FirstJobId), as ranks take their ports by the job's number, also those of another Slurm of this kind.
CONFIGURATION = '''
ClusterName=fp8test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
FirstJobId={job}
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/linear
SwitchType=switch/none
MpiDefault=none
JobCompType=jobcomp/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SlurmdParameters=config_overrides
ReturnToService=2
KillWait=2
InactiveLimit=0
NodeName={host} NodeAddr=127.0.0.1 CPUs=64 State=UNKNOWN
PartitionName=test Nodes={host} Default=YES MaxTime=INFINITE State=UP
'''


class Missing(Exception):
    """Why there is no Slurm here that runs."""


def stop(processes):
    """The last that was started first; none outlives this."""
    for one in reversed(processes):
        with contextlib.suppress(ProcessLookupError):
            one.send_signal(signal.SIGTERM)
        try:
            one.wait(10)
        except subprocess.TimeoutExpired:
            one.kill()
            one.wait()


@contextlib.contextmanager
def one_node():
    """Yields the variables with which srun finds it. Missing where Slurm, or a part of it, is not installed, or cannot run."""
    programs = {name: shutil.which(name, path=PATH) for name in ('munged', 'slurmctld', 'slurmd', 'srun', 'sinfo', 'scancel', 'squeue')}
    absent = [name for name, path in programs.items() if not path]
    if absent:
        raise Missing(f'no {", ".join(absent)} here; Debian: slurmctld, slurmd, slurm-client, munge')
    # Short: sockets have names of at most 108 bytes.
    folder = tempfile.mkdtemp(prefix='fp8slurm-', dir='/tmp')
    user = pwd.getpwuid(os.getuid()).pw_name
    started, logs = [], []

    def start(name, *arguments):
        # PMIx's server in slurmd would listen for what the caller's launcher told it.
        environment = {key: value for key, value in os.environ.items() if not re.match(r'SLURM_|PMIX_|OMPI_', key)}
        log = open(os.path.join(folder, name + '.log'), 'w+')
        logs.append(log)
        started.append(subprocess.Popen([programs[name], *arguments], stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                                        preexec_fn=lambda: end_with_parent(signal.SIGTERM),
                                        env={**environment, 'SLURM_CONF': f'{folder}/slurm.conf'}))

    def ask(name, *arguments):
        return subprocess.run([programs[name], *arguments], env={**os.environ, 'SLURM_CONF': f'{folder}/slurm.conf'}, timeout=PATIENCE,
                              capture_output=True, text=True).stdout.strip()

    def what_they_said():
        return ''.join(f'{log.name}:\n{os.pread(log.fileno(), 1 << 16, 0).decode(errors="replace")[-2000:]}' for log in logs)

    try:
        # The daemon refuses folders into which others may write, and wants all to reach its socket.
        os.chmod(folder, 0o755)
        for name in 'state', 'spool':
            os.mkdir(os.path.join(folder, name), 0o755)
        with open(os.open(f'{folder}/munge.key', os.O_WRONLY | os.O_CREAT, 0o400), 'wb') as key:
            key.write(os.urandom(1024))
        with open(f'{folder}/slurm.conf', 'w') as configuration:
            configuration.write(CONFIGURATION.format(host=socket.gethostname().split('.')[0], ports=free_ports(2), folder=folder,
                                                     user=user, job=random.randrange(1, 60000)))
        start('munged', '--foreground', '--force', f'--socket={folder}/munge.socket', f'--key-file={folder}/munge.key',
              f'--pid-file={folder}/munged.pid', f'--seed-file={folder}/munge.seed', f'--log-file={folder}/munge.log')
        start('slurmctld', '-D')
        start('slurmd', '-D')
        deadline = time.monotonic() + PATIENCE
        while ask('sinfo', '--noheader', '--format=%T') != 'idle':
            if time.monotonic() > deadline or any(one.poll() is not None for one in started):
                raise Missing(f'Slurm does not start here: {what_they_said()}')
            time.sleep(0.1)
        yield {'SLURM_CONF': f'{folder}/slurm.conf'}
    finally:
        # What still runs of jobs first, with the daemons that end it.
        if len(started) == 3 and all(one.poll() is None for one in started):
            ask('scancel', '--signal=KILL', f'--user={user}')
            deadline = time.monotonic() + 10
            while ask('squeue', '--noheader') and time.monotonic() < deadline:
                time.sleep(0.1)
        stop(started)
        for log in logs:
            log.close()
        shutil.rmtree(folder, ignore_errors=True)


def has_pmix(variables):
    """Whether this Slurm has the plugin."""
    found = subprocess.run([shutil.which('srun', path=PATH), '--mpi=list'], env={**os.environ, **variables}, capture_output=True, text=True)
    return re.search(r'^\s*pmix', found.stdout + found.stderr, re.M) is not None
