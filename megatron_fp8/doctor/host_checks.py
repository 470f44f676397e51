"""Checks of the host: driver, shared memory, limits, directories. Imports no torch.

Each reads what the system says of itself; paths are arguments, so that a host can be described by files.
"""

from __future__ import annotations

import os
import resource
import subprocess
import tempfile
from pathlib import Path

from megatron_fp8.doctor.finding import Finding, HostContext, Status

# NCCL takes some 10 MB for each connection of two processes of a machine; containers are born with 64 MiB for all.
LEAST_SHARED_BYTES = 1 << 30
LEAST_SHARED_BYTES_WITHOUT_GPUS = 1 << 20
LEAST_FREE_BYTES = 1 << 30
LEAST_FREE_FILES = 10_000
LEAST_OPEN_FILES = 1024
LEAST_PROCESSES = 512
_QUERY = "name,driver_version,memory.total,memory.used,ecc.errors.uncorrected.volatile.total"


def gpu_nodes(devices: Path = Path("/dev")) -> list[Path]:
    """Device files of the NVIDIA GPUs visible to this process."""
    return sorted(path for path in devices.glob("nvidia[0-9]*") if path.name.removeprefix("nvidia").isdecimal())


def driver(context: HostContext, devices: Path = Path("/dev"), smi: str = "nvidia-smi") -> Finding:
    """The NVIDIA driver and its GPUs."""
    nodes = gpu_nodes(devices)
    if len(nodes) < context.min_gpus:
        text = f"{len(nodes)} GPUs found, but --min-gpus asks for {context.min_gpus}"
        advice = "start the container with its GPUs (docker: --gpus all; Kubernetes: limits of nvidia.com/gpu)"
        return Finding("driver", Status.FAULT, text, advice)
    if not nodes:
        return Finding("driver", Status.ABSENT, "no NVIDIA GPU: everything runs on the CPU stand-in")
    try:
        command = [smi, f"--query-gpu={_QUERY}", "--format=csv,noheader,nounits"]
        answer = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        said = (getattr(error, "stdout", "") or getattr(error, "stderr", "") or str(error)).strip()
        advice = "install or restart the driver on the host; in a container, use the NVIDIA Container Toolkit"
        return Finding("driver", Status.FAULT, f"{len(nodes)} GPUs, but nvidia-smi fails: {said}", advice)
    gpus = [[word.strip() for word in line.split(",")] for line in answer.strip().splitlines()]
    names = sorted({gpu[0] for gpu in gpus})
    broken = [f"GPU {index}: {gpu[4]}" for index, gpu in enumerate(gpus) if gpu[4].isdecimal() and int(gpu[4])]
    text = f"{len(gpus)} x {', '.join(names)}, {int(gpus[0][2]) / 1024:.0f} GiB each"
    versions = {"NVIDIA driver": gpus[0][1]}
    if broken:
        text += f"; uncorrectable ECC errors since the last reset: {', '.join(broken)}"
        return Finding("driver", Status.FAULT, text, "drain the node and reset the GPU", versions)
    used = sum(int(gpu[3]) for gpu in gpus if gpu[3].isdecimal())
    return Finding("driver", Status.OK, f"{text}, {used / 1024:.1f} GiB in use", versions=versions)


def shared_memory(
    context: HostContext,  # noqa: ARG001 - every check is called alike
    path: Path = Path("/dev/shm"),
    devices: Path = Path("/dev"),
) -> Finding:
    """Whether /dev/shm is writable and large enough for NCCL."""
    advice = "docker: --shm-size=8g or --ipc=host; Kubernetes: an emptyDir with medium: Memory at /dev/shm"
    try:
        with tempfile.TemporaryFile(dir=path) as file:
            file.write(bytes(4096))
            file.flush()
        state = os.statvfs(path)
    except OSError as error:
        return Finding("shared memory", Status.FAULT, f"{path} is not writable: {error}", advice)
    free = state.f_bavail * state.f_frsize
    text = f"{path}: {_gib(free)} of {_gib(state.f_blocks * state.f_frsize)} free"
    least = LEAST_SHARED_BYTES if gpu_nodes(devices) else LEAST_SHARED_BYTES_WITHOUT_GPUS
    if free < least:
        return Finding("shared memory", Status.FAULT, f"{text}; NCCL needs {_gib(least)}", advice)
    return Finding("shared memory", Status.OK, text)


def disk(context: HostContext) -> Finding:
    """Whether the run root, or the directory it would be created in, is writable and has free space."""
    path = nearest_directory(Path(context.run_root))
    advice = "name another directory (--run-root here, run.root in the config), or mount a volume there"
    try:
        with tempfile.TemporaryDirectory(prefix=".doctor-", dir=path) as directory:
            written = Path(directory) / "written"
            with written.open("wb") as file:
                file.write(bytes(4096))
                file.flush()
                os.fsync(file.fileno())
            written.rename(Path(directory) / "renamed")
        state = os.statvfs(path)
    except OSError as error:
        return Finding("run root", Status.FAULT, f"{path} is not writable: {error}", advice)
    free, total = state.f_bavail * state.f_frsize, state.f_blocks * state.f_frsize
    kind = file_system(path)
    text = f"{path} ({kind}): {_gib(free)} of {_gib(total)} free"
    if kind == "overlay":
        text += "; this is the container's own layer, which is lost with the container"
    if free < LEAST_FREE_BYTES:
        return Finding("run root", Status.FAULT, f"{text}, too little for a checkpoint", advice)
    # Some file systems do not count inodes.
    if state.f_files and state.f_favail < LEAST_FREE_FILES:
        return Finding("run root", Status.FAULT, f"{text}, but only {state.f_favail} free inodes", advice)
    return Finding("run root", Status.OK, text)


def home(context: HostContext, directories: dict[str, str] | None = None) -> Finding:  # noqa: ARG001
    """Whether the home directory (caches of libraries) and the temporary directory are writable."""
    chosen = directories or {"home": str(Path.home()), "temporary": tempfile.gettempdir()}
    for name, path in chosen.items():
        try:
            with tempfile.TemporaryFile(dir=path) as file:
                file.write(b"written")
        except OSError as error:
            text = f"the {name} directory {path} is not writable: {error}"
            advice = "set HOME (or TMPDIR) to a directory this user can write to"
            return Finding("home", Status.FAULT, text, advice)
    return Finding("home", Status.OK, " and ".join(f"{name} {path}" for name, path in chosen.items()))


def limits(
    context: HostContext,  # noqa: ARG001
    devices: Path = Path("/dev"),
    system: Path = Path("/sys"),
) -> Finding:
    """Whether resource limits (files, memory, locked memory, processes) are high enough for training."""
    wrong, advice = [], []
    open_files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if not _unlimited(open_files) and open_files < LEAST_OPEN_FILES:
        wrong.append(f"{open_files} open files (needs {LEAST_OPEN_FILES})")
        advice.append("ulimit -n 65536")
    if not _unlimited(resource.getrlimit(resource.RLIMIT_FSIZE)[0]):
        wrong.append("file size is limited")
        advice.append("ulimit -f unlimited")
    has_gpus = bool(gpu_nodes(devices))
    if has_gpus and not _unlimited(resource.getrlimit(resource.RLIMIT_AS)[0]):
        wrong.append("virtual memory is limited, but CUDA reserves as much as all GPUs have")
        advice.append("ulimit -v unlimited")
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    adapters = sorted(path.name for path in (system / "class/infiniband").glob("*"))
    if adapters and has_gpus and not _unlimited(locked):
        wrong.append(f"{_gib(locked)} of locked memory, but {', '.join(adapters)} need it unlimited")
        advice.append("ulimit -l unlimited (docker: --ulimit memlock=-1)")
    processes = _processes_left(system / "fs/cgroup")
    if processes is not None and processes < LEAST_PROCESSES:
        wrong.append(f"{processes} more processes and threads (needs {LEAST_PROCESSES})")
        advice.append("docker: --pids-limit=-1; Kubernetes: the node's podPidsLimit")
    if wrong:
        return Finding("limits", Status.FAULT, "; ".join(wrong), "; ".join(advice))
    files = "unlimited" if _unlimited(open_files) else str(open_files)
    memory = _gib(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    return Finding("limits", Status.OK, f"{files} open files, {memory} of memory, {os.cpu_count()} cores")


def nearest_directory(path: Path) -> Path:
    """`path`, or its nearest existing parent."""
    absolute = path.expanduser().absolute()
    return next(directory for directory in (absolute, *absolute.parents) if directory.is_dir())


def file_system(path: Path, mounts: Path = Path("/proc/self/mountinfo")) -> str:
    """The type of the file system of `path`, such as ext4 or nfs4."""
    kinds = {}
    for line in mounts.read_text(encoding="utf-8").splitlines():
        before, _, after = line.partition(" - ")
        kinds[before.split()[4]] = after.split()[0]
    resolved = path.resolve()
    return next((kinds[str(above)] for above in (resolved, *resolved.parents) if str(above) in kinds), "unknown")


def _processes_left(group: Path) -> int | None:
    try:
        most = (group / "pids.max").read_text(encoding="ascii").strip()
        now = (group / "pids.current").read_text(encoding="ascii").strip()
    except OSError:
        return None
    return int(most) - int(now) if most.isdecimal() else None


def _unlimited(limit: int) -> bool:
    return limit == resource.RLIM_INFINITY


def _gib(size: int) -> str:
    return f"{size / (1 << 30):.3g} GiB"
