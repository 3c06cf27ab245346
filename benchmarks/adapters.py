"""Time of a request whose LoRA adapter has to be loaded first, by the adapter's size.

    .venv/bin/python benchmarks/adapters.py [--sizes 1,30,300] [--rounds 5]

Two mock workers have stores of their own, as on two machines, and the network between them is the
loopback. The engine takes no time to load: what is measured is everything else. *far*: the files
come from the other worker; *near*: they are in the node's store, and another adapter makes room,
for half a second; *loaded*: nothing is to be done.
"""

import argparse
import json
import re
import statistics
import subprocess
import tempfile
import time
import urllib.request
from pathlib import Path

from local_mesh import Mesh

MODEL = "kvmesh-demo"
MB = 1_000_000
IDLE_S = 0.05
OPTIONS = {
    "KVMESH_MOCK_SPEEDUP": "1000",
    "KVMESH_WORKER_MAX_ADAPTERS": "1",
    "KVMESH_WEIGHTS_SHARE": "true",
    "KVMESH_ROUTER_ADAPTER_IDLE_S": str(IDLE_S),
}


class TwoNodes(Mesh):
    """A mesh whose workers have stores of their own."""

    def add_service(self, role: str, name: str, options: dict[str, str]) -> None:
        store = self.folder / f"store-{name}"
        super().add_service(role, name, {**options, "KVMESH_WEIGHTS_DIRECTORY": str(store)})

    def instance(self, worker: str) -> str:
        found = re.search(rf"as ({worker}-[0-9a-f]+)", self.log(worker))
        assert found is not None
        return found[1]

    def adapter(self, *arguments: str) -> None:
        """Run `kvmesh adapter`."""
        subprocess.run(
            [*self.command("adapter"), *arguments],
            env={**self.options, "KVMESH_NATS_URL": self.nats_url, "PATH": ""},
            check=True,
            capture_output=True,
        )

    def request(self, model: str, instance: str) -> float:
        """Seconds of a request for one token of one worker."""
        body = {"model": model, "prompt": "Hello", "max_tokens": 1}
        body["nvext"] = {"backend_instance_id": instance}
        request = urllib.request.Request(
            f"{self.url}/v1/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        began = time.perf_counter()
        urllib.request.urlopen(request, timeout=60).close()
        return time.perf_counter() - began


def write_adapter(folder: Path, size: int, content: int) -> Path:
    """An adapter with one tensor of so many bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    tensor = {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}
    header = json.dumps({"base_model.q_proj.lora_A.weight": tensor}).encode()
    with (folder / "adapter_model.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.write(bytes([content]) * size)
    return folder


def measure(mesh: TwoNodes, folder: Path, size: int, number: int) -> dict[str, float]:
    """The seconds of one request in each state."""
    name, other = f"wanted-{number}", f"other-{number}"
    two = mesh.instance("worker-1")
    wanted = write_adapter(folder / "wanted", size, number % 256)
    mesh.adapter("load", name, str(wanted), "--worker", "worker-0")
    far = mesh.request(name, two)
    loaded = min(mesh.request(name, two) for _ in range(3))
    small = str(write_adapter(folder / "other", 1000, number % 256))
    mesh.adapter("load", other, small, "--worker", "worker-1", "--evictable")
    time.sleep(2 * IDLE_S)
    near = mesh.request(name, two)
    mesh.adapter("unload", name)
    mesh.adapter("unload", other, "--worker", "worker-1")
    return {"far": far, "near": near, "loaded": loaded}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", default="1,30,300", help="of adapters, in MB [1,30,300]")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        mesh = TwoNodes(Path(folder), OPTIONS, frontends=1)
        try:
            mesh.start(workers=2)
            print(f"{'size':>8} {'far':>8} {'near':>8} {'loaded':>8}")
            number = 0
            for size in map(int, arguments.sizes.split(",")):
                rounds = []
                for _ in range(arguments.rounds):
                    number += 1
                    rounds.append(measure(mesh, Path(folder), size * MB, number))
                row = [statistics.median(r[k] for r in rounds) for k in ("far", "near", "loaded")]
                print(f"{size:>5} MB " + " ".join(f"{1000 * each:>5.0f} ms" for each in row))
        finally:
            mesh.stop()


if __name__ == "__main__":
    main()
