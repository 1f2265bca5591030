"""Which processes a cluster has started, read from its environment before JAX runs.

JAX finds the same clusters in `jax.distributed.initialize`, but only while it starts, and does not tell where process 0
is. podling has to know that first: who is missing is said before JAX begins to wait.
"""

import json
import re
import socket
import ssl
import urllib.request
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from podling.errors import InputError, Problem
from podling.parallel.hardware import accelerator

PORT = 29470  # for pods that share their machine with nobody
PORTS_FROM = 61440  # of the last 4096, one by the number of the job: two jobs may share a machine
METADATA = "http://metadata.google.internal/computeMetadata/v1/instance/attributes/"
SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")


@dataclass(frozen=True)
class Place:
    """This process among those of a run."""

    process: int
    count: int
    coordinator: str  # host:port of process 0
    found_by: str  # in words; "" when the person said it
    local_devices: tuple[int, ...] | None = None  # GPUs of this machine that are this process's; None for all


def find_cluster(environ: Mapping[str, str], get: Callable[[str], str] | None = None) -> Place | None:
    """The cluster this process was started by, or None when it is alone.

    Args:
        environ: environment variables.
        get: fetches a URL; another one in tests.

    Raises:
        InputError: a cluster is there, and does not say enough to start in it.
    """
    for finder in (_slurm, _open_mpi, _tpu_by_environment, _kubernetes, _tpu_by_metadata):
        try:
            place = finder(environ, get or _get)
        except (KeyError, ValueError, OSError) as error:
            name = finder.__name__.strip("_").replace("_", " ")
            what = f"started by {name}, but {type(error).__name__} {error} keeps podling from finding the others"
            raise InputError(Problem("cluster", what, FLAGS)) from error
        if place is not None:
            return place if place.count > 1 else None
    return None


FLAGS = "say it with --coordinator, --num-processes and --process-id (--num-processes 1: alone)"


def _slurm(environ: Mapping[str, str], get: Callable[[str], str]) -> Place | None:
    """Inside `srun`: https://slurm.schedmd.com/srun.html, output environment variables."""
    needed = ("SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID")
    if not all(name in environ for name in needed):
        return None
    nodes = environ["SLURM_STEP_NODELIST"]
    first = re.match(r"([^,\[]+)(?:\[([^-,\]]+))?", nodes)  # node[01-04,7],other → node01
    if first is None:
        raise ValueError(f"SLURM_STEP_NODELIST={nodes}")
    tasks = environ.get("SLURM_STEP_TASKS_PER_NODE", "1")  # 4(x2),3
    shared = max(int(number) for number in re.findall(r"(?<!x)\b\d+", tasks)) > 1
    return Place(
        process=int(environ["SLURM_PROCID"]),
        count=int(environ["SLURM_NTASKS"]),
        coordinator=f"{first[1]}{first[2] or ''}:{PORTS_FROM + int(environ['SLURM_JOB_ID']) % 4096}",
        found_by=f"SLURM job {environ['SLURM_JOB_ID']}",
        local_devices=_one_each(environ, int(environ["SLURM_LOCALID"]), shared),
    )


def _open_mpi(environ: Mapping[str, str], get: Callable[[str], str]) -> Place | None:
    """Under `mpirun` of Open MPI.

    Version 4 says where mpirun runs, and rank 0 is expected there: OMPI_MCA_orte_hnp_uri is like
    `1531576320.0;tcp://10.96.0.1,10.148.0.1:34911`. Version 5 does not.
    """
    if "OMPI_COMM_WORLD_SIZE" not in environ:
        return None
    count, here = int(environ["OMPI_COMM_WORLD_SIZE"]), int(environ["OMPI_COMM_WORLD_LOCAL_SIZE"])
    uri = environ.get("OMPI_MCA_orte_hnp_uri", "")
    address = re.search(r"tcp://([^:,]+)|tcp6://\[([^\],]+)", uri)
    if address is None and here < count:
        raise InputError(Problem("cluster", "this Open MPI does not tell where rank 0 is", FLAGS))
    host = "127.0.0.1" if address is None else address[1] or f"[{address[2]}]"
    job = uri or environ.get("PMIX_NAMESPACE", "")
    return Place(
        process=int(environ["OMPI_COMM_WORLD_RANK"]),
        count=count,
        coordinator=f"{host}:{PORTS_FROM + zlib.crc32(job.encode()) % 4096}",
        found_by="Open MPI",
        local_devices=_one_each(environ, int(environ["OMPI_COMM_WORLD_LOCAL_RANK"]), here > 1),
    )


def _one_each(environ: Mapping[str, str], local: int, shared: bool) -> tuple[int, ...] | None:
    """Processes on one machine take one GPU each, unless the scheduler has already shown each of them only its own."""
    shown = [name for name in environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    return (local,) if shared and len(shown) != 1 else None


def _tpu_by_environment(environ: Mapping[str, str], get: Callable[[str], str]) -> Place | None:
    """Where the TPU runtime itself was told: Google Kubernetes Engine, and notebooks with one worker."""
    workers = environ.get("TPU_PROCESS_ADDRESSES") or environ.get("TPU_WORKER_HOSTNAMES")
    if not workers:
        return None
    hosts = [worker.split(":")[0] for worker in workers.split(",")]
    worker = int(environ["TPU_WORKER_ID"]) if len(hosts) > 1 or "MEGASCALE_NUM_SLICES" in environ else 0
    return _tpu(hosts, worker, environ, "TPU workers in the environment")


def _tpu_by_metadata(environ: Mapping[str, str], get: Callable[[str], str]) -> Place | None:
    """A TPU virtual machine asks Google's metadata server: https://cloud.google.com/compute/docs/metadata."""
    if accelerator() != "tpu" or "TPU_SKIP_MDS_QUERY" in environ:
        return None
    try:
        endpoints = get(METADATA + "worker-network-endpoints")
        worker = int(get(METADATA + "agent-worker-number"))
        facts = dict(re.findall(r"^\s*(\w+): *'?([^'\n]*)'?", get(METADATA + "tpu-env"), re.MULTILINE))
    except OSError:
        return None  # no such server: the notebook of some other service, with its own TPU
    # Either host names, or triples name:id:address.
    hosts = [endpoint.split(":")[-1] for endpoint in endpoints.strip().split(",")]
    return _tpu(hosts, worker, {**facts, **environ}, "TPU pod")


def _tpu(hosts: list[str], worker: int, facts: Mapping[str, str], found_by: str) -> Place:
    """Several slices, when there are, are numbered one after another; the first worker of slice 0 coordinates."""
    slices = int(facts.get("MEGASCALE_NUM_SLICES") or 1)
    this = int(facts.get("MEGASCALE_SLICE_ID") or 0)
    host = facts.get("MEGASCALE_COORDINATOR_ADDRESS", "").split(":")[0] or hosts[0]
    name = found_by if slices == 1 else f"{found_by}, {slices} slices"
    return Place(this * len(hosts) + worker, slices * len(hosts), f"{host}:{PORT}", name)


def _kubernetes(environ: Mapping[str, str], get: Callable[[str], str]) -> Place | None:
    """A pod of an Indexed Job, alone or in a JobSet.

    Its host is named job-index and its fellows are found by a headless service, the pods' `subdomain`:
    https://kubernetes.io/docs/tasks/job/job-with-pod-to-pod-communication/
    """
    if "KUBERNETES_SERVICE_HOST" not in environ or "JOB_COMPLETION_INDEX" not in environ:
        return None
    index = int(environ["JOB_COMPLETION_INDEX"])
    name, _, domain = socket.getfqdn(environ["HOSTNAME"]).partition(".")
    job = name.removesuffix(f"-{index}")
    namespace = (SERVICE_ACCOUNT / "namespace").read_text().strip()
    host = f"https://{environ['KUBERNETES_SERVICE_HOST']}:{environ.get('KUBERNETES_SERVICE_PORT', '443')}"
    try:
        spec = json.loads(get(f"{host}/apis/batch/v1/namespaces/{namespace}/jobs/{job}"))["spec"]
    except OSError as error:
        what = f"Kubernetes does not let this pod read its job {job}: {error}"
        fix = f"let its service account `get` jobs in {namespace!r}, or {FLAGS}"
        raise InputError(Problem("cluster", what, fix)) from error
    count = int(spec.get("parallelism", 1))
    if count > 1 and not domain:
        what = f"the pods of job {job} have no names for one another"
        raise InputError(Problem("cluster", what, "give them a headless service and name it as their `subdomain`"))
    return Place(index, count, f"{job}-0.{domain}:{PORT}", f"Kubernetes job {job}")


def _get(url: str, timeout_s: float = 3.0) -> str:
    """Fetch from the metadata server, or from Kubernetes as this pod."""
    headers, context = {"Metadata-Flavor": "Google"}, None
    if url.startswith("https://"):
        token = (SERVICE_ACCOUNT / "token").read_text().strip()
        headers = {"Authorization": f"Bearer {token}"}
        context = ssl.create_default_context(cafile=str(SERVICE_ACCOUNT / "ca.crt"))
    handlers = [urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context)]
    request = urllib.request.Request(url, headers=headers)
    with urllib.request.build_opener(*handlers).open(request, timeout=timeout_s) as answer:
        return answer.read().decode()
