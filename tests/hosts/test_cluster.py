"""What a scheduler's environment says, by the variables and answers that its documentation gives as examples."""

import json
from pathlib import Path

import pytest

from podling.errors import InputError
from podling.hosts import cluster
from podling.hosts.cluster import find_cluster
from podling.hosts.hosts import ALONE
from podling.hosts.join import HostArgs, host_problems, join

SLURM = {
    "SLURM_JOB_ID": "70001",
    "SLURM_STEP_NODELIST": "node[03-04,7],other",
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "2",
    "SLURM_LOCALID": "0",
    "SLURM_STEP_TASKS_PER_NODE": "1(x4)",
}
OMPI = {
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911",
}


def no_network(url: str) -> str:
    raise AssertionError(f"asked {url}")


def test_slurm() -> None:
    place = find_cluster(SLURM, no_network)
    assert place is not None
    assert (place.process, place.count, place.local_devices) == (2, 4, None)
    assert place.coordinator == f"node03:{61440 + 70001 % 4096}"
    assert "SLURM job 70001" in place.found_by


@pytest.mark.parametrize(
    ("nodes", "first"), [("node1", "node1"), ("a1,b[2-3]", "a1"), ("gpu[001,007-015]", "gpu001"), ("x[1-2]y", "x1")]
)
def test_slurm_names_the_first_node(nodes: str, first: str) -> None:
    place = find_cluster({**SLURM, "SLURM_STEP_NODELIST": nodes}, no_network)
    assert place is not None and place.coordinator.split(":")[0] == first


def test_tasks_of_one_machine_take_a_gpu_each() -> None:
    shared = {**SLURM, "SLURM_STEP_TASKS_PER_NODE": "2(x2)", "SLURM_LOCALID": "1"}
    place = find_cluster(shared, no_network)
    assert place is not None and place.local_devices == (1,)
    already = find_cluster({**shared, "CUDA_VISIBLE_DEVICES": "5"}, no_network)
    assert already is not None and already.local_devices is None


def test_a_batch_script_is_no_step_and_one_task_is_alone() -> None:
    assert find_cluster({key: value for key, value in SLURM.items() if "STEP" not in key}, no_network) is None
    assert find_cluster({**SLURM, "SLURM_NTASKS": "1", "SLURM_PROCID": "0"}, no_network) is None


def test_open_mpi() -> None:
    place = find_cluster(OMPI, no_network)
    assert place is not None
    assert (place.process, place.count, place.local_devices) == (3, 4, (1,))
    assert place.coordinator.startswith("10.96.0.1:")
    six = {**OMPI, "OMPI_MCA_orte_hnp_uri": "1314521088.0;tcp6://[fe80::b9b,2620:10d::2]:43370"}
    place = find_cluster(six, no_network)
    assert place is not None and place.coordinator.startswith("[fe80::b9b]:")


def test_open_mpi_5_tells_no_address_and_needs_none_on_one_machine() -> None:
    five = {key: value for key, value in OMPI.items() if "orte" not in key}
    with pytest.raises(InputError, match="where rank 0 is"):
        find_cluster(five, no_network)
    here = find_cluster({**five, "OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, no_network)
    assert here is not None and here.coordinator.startswith("127.0.0.1:")


def test_tpu_workers_in_the_environment() -> None:
    environ = {"TPU_WORKER_HOSTNAMES": "t-0.svc,t-1.svc", "TPU_WORKER_ID": "1"}
    place = find_cluster(environ, no_network)
    assert place is not None
    assert (place.process, place.count, place.coordinator) == (1, 2, f"t-0.svc:{cluster.PORT}")
    slices = {"MEGASCALE_NUM_SLICES": "2", "MEGASCALE_SLICE_ID": "1", "MEGASCALE_COORDINATOR_ADDRESS": "s0:8080"}
    place = find_cluster({**environ, **slices}, no_network)
    assert place is not None
    assert (place.process, place.count, place.coordinator) == (3, 4, f"s0:{cluster.PORT}")


def test_a_notebook_with_one_worker_is_alone() -> None:
    assert find_cluster({"TPU_WORKER_HOSTNAMES": "localhost", "TPU_WORKER_ID": "0"}, no_network) is None


@pytest.mark.parametrize("endpoints", ["10.0.0.2,10.0.0.3", "w0:1:10.0.0.2,w1:2:10.0.0.3"])
def test_tpu_pod_asks_the_metadata_server(monkeypatch: pytest.MonkeyPatch, endpoints: str) -> None:
    answers = {
        "worker-network-endpoints": endpoints,
        "agent-worker-number": "1\n",
        "tpu-env": "ZONE: 'us'\nTYPE: 'v5'\n",
    }
    monkeypatch.setattr(cluster, "accelerator", lambda: "tpu")
    place = find_cluster({}, lambda url: answers[url.rpartition("/")[2]])
    assert place is not None
    assert (place.process, place.count, place.coordinator) == (1, 2, f"10.0.0.2:{cluster.PORT}")
    answers["tpu-env"] += (
        "MEGASCALE_NUM_SLICES: '2'\nMEGASCALE_SLICE_ID: '1'\nMEGASCALE_COORDINATOR_ADDRESS: '10.9.9.9'\n"
    )
    place = find_cluster({}, lambda url: answers[url.rpartition("/")[2]])
    assert place is not None and (place.process, place.count) == (3, 4)
    assert place.coordinator.startswith("10.9.9.9:")


def test_a_tpu_without_that_server_is_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody(url: str) -> str:
        raise OSError("no route")

    monkeypatch.setattr(cluster, "accelerator", lambda: "tpu")
    assert find_cluster({}, nobody) is None


@pytest.fixture
def pod(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, str]:
    (tmp_path / "namespace").write_text("research")
    monkeypatch.setattr(cluster, "SERVICE_ACCOUNT", tmp_path)
    monkeypatch.setattr(cluster.socket, "getfqdn", lambda name: f"{name}.svc.research.svc.cluster.local")
    return {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "2", "HOSTNAME": "gpt-2"}


def test_kubernetes(pod: dict[str, str]) -> None:
    asked: list[str] = []

    def get(url: str) -> str:
        asked.append(url)
        return json.dumps({"spec": {"parallelism": 4}})

    place = find_cluster(pod, get)
    assert place is not None
    assert (place.process, place.count) == (2, 4)
    assert place.coordinator == f"gpt-0.svc.research.svc.cluster.local:{cluster.PORT}"
    assert asked == ["https://10.0.0.1:443/apis/batch/v1/namespaces/research/jobs/gpt"]


def test_kubernetes_refuses_with_a_way_out(pod: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(url: str) -> str:
        raise OSError("HTTP Error 403: Forbidden")

    with pytest.raises(InputError, match="403.*\n.*`get` jobs"):
        find_cluster(pod, forbidden)
    monkeypatch.setattr(cluster.socket, "getfqdn", lambda name: name)
    with pytest.raises(InputError, match="subdomain"):
        find_cluster(pod, lambda url: json.dumps({"spec": {"parallelism": 4}}))


def test_a_pod_of_no_job_and_an_empty_environment_are_alone(pod: dict[str, str]) -> None:
    del pod["JOB_COMPLETION_INDEX"]
    assert find_cluster(pod, no_network) is None
    assert find_cluster({}, no_network) is None


def test_a_cluster_that_says_nonsense_is_named() -> None:
    with pytest.raises(InputError, match="slurm.*nine"):
        find_cluster({**SLURM, "SLURM_NTASKS": "nine"}, no_network)


@pytest.mark.parametrize(
    ("args", "named"),
    [
        (HostArgs(), []),
        (HostArgs(num_processes=1), []),
        (HostArgs("h:1", 2, 1), []),
        (HostArgs("[::1]:1234", 2, 1), []),
        (HostArgs("h:1"), ["--num-processes", "--process-id"]),
        (HostArgs(process_id=0), ["--coordinator", "--num-processes"]),
        (HostArgs("h", 2, 0), ["--coordinator"]),
        (HostArgs("h:0", 2, 0), ["--coordinator"]),
        (HostArgs("h:70000", 2, 0), ["--coordinator"]),
        (HostArgs("h:1", 2, 2), ["--process-id"]),
        (HostArgs("h:1", -1, 0), ["--num-processes"]),
        (HostArgs("h", -1, -2), ["--coordinator", "--num-processes", "--process-id"]),
    ],
)
def test_flags_are_all_checked_at_once(args: HostArgs, named: list[str]) -> None:
    assert [problem.where for problem in host_problems(args)] == named


def test_alone_is_alone_whatever_the_cluster_says(monkeypatch: pytest.MonkeyPatch) -> None:
    for key, value in SLURM.items():
        monkeypatch.setenv(key, value)
    assert join(HostArgs(num_processes=1), print) is ALONE
