"""Compose meshes in real containers; needs a Docker daemon, or root and what starts one."""

import re
from collections.abc import Iterator

import pytest
from support.compose import COMPOSE
from support.containers import ComposeMesh
from support.docker import Docker, NoDocker, ensure_python, open_docker


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(COMPOSE.parent / "tests" / "containers"):
            item.add_marker(pytest.mark.containers)
            item.add_marker(pytest.mark.timeout(3600))


@pytest.fixture(scope="session")
def docker() -> Iterator[Docker]:
    """A daemon that has the services' image."""
    try:
        docker = open_docker()
    except NoDocker as error:
        pytest.skip(str(error))
    try:
        base = re.search(r"^ARG PYTHON=(\S+)", (COMPOSE / "Dockerfile").read_text(), re.MULTILINE)
        assert base is not None
        ensure_python(docker, base[1])
        mesh = ComposeMesh(docker)
        mesh.compose("build", timeout=3600)
        yield docker
    finally:
        docker.close()


@pytest.fixture
def mesh(docker: Docker) -> Iterator[ComposeMesh]:
    """A mesh that has not started yet; it is removed with its volumes."""
    mesh = ComposeMesh(docker, {"KVMESH_ALLOW_ANONYMOUS": "true"})
    mesh.remove()
    try:
        yield mesh
    finally:
        mesh.remove()
