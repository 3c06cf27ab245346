#!/bin/sh
# Says in one sentence, with status 1, why compose.yaml cannot run here.
needs="kvmesh needs Docker Engine 26 and Docker Compose 2.26 or later"
from="Debian 13 and Ubuntu 24.04 with its updates have them, https://docs.docker.com/engine/install others"

refuse() {
    echo "$needs, and $1: $from." >&2
    exit 1
}

command -v docker > /dev/null || refuse "there is no docker"
engine=$(docker version --format '{{.Server.Version}}' 2> /dev/null) || {
    echo "The Docker daemon does not answer: $(docker version 2>&1 > /dev/null | tail -n 1)" >&2
    exit 1
}
[ "${engine%%.*}" -ge 26 ] 2> /dev/null || refuse "this engine is $engine"
compose=$(docker compose version --short 2> /dev/null) || refuse "this docker has no compose"
compose=${compose#v}
minor=${compose#*.}
minor=${minor%%.*}
[ "${compose%%.*}" -gt 2 ] 2> /dev/null || { [ "${compose%%.*}" -eq 2 ] && [ "$minor" -ge 26 ]; } 2> /dev/null ||
    refuse "this Compose is $compose"
