#!/bin/sh
# NIXL 1.5.1: metadata that an agent loads of another one adds regions and takes none away. Memory that its owner has deregistered stays known to
# readers, and with UCX on one machine they go on reading it without an error, whatever the process keeps there by then; a reader must remove the
# agent and load it again. A transfer that is posted again without a message sends the last one once more. A transfer to a file that carries a message
# is an error of the backend (POSIX).
# The script puts a stand-in in the place of torch, which these calls do not use. Observed in November 2026; exits with 1 if a later run differs.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet numpy==2.3.5
venv/bin/pip install --quiet --no-deps nixl-cu12==1.5.1
cat > program.py <<'EOF'
import ctypes, os, sys, time
from unittest.mock import MagicMock

sys.modules["torch"] = MagicMock()
from nixl_cu12._api import nixl_agent, nixl_agent_config

SIZE = 4096
memory = [ctypes.create_string_buffer(SIZE) for _ in range(3)]
old, new, into = map(ctypes.addressof, memory)


def agent(name, backend):
    return nixl_agent(name, nixl_agent_config(backends=[backend], enable_prog_thread=False))


owner, reader = agent("owner", "UCX"), agent("reader", "UCX")
reader.register_memory([(into, SIZE, 0, "")], "DRAM")


def made(address, message=b""):
    here, there = (reader.get_xfer_descs([(each, SIZE, 0)], "DRAM") for each in (into, address))
    return reader.initialize_xfer("READ", here, there, "owner", message)


def posted(transfer):
    reader.transfer(transfer)
    ends = time.monotonic() + 20
    while (state := reader.check_xfer_state(transfer)) == "PROC" and time.monotonic() < ends:
        owner.get_new_notifs()
    return state


def read(address):
    try:
        return posted(made(address))
    except Exception as error:
        return str(error)


def message():
    ends = time.monotonic() + 20
    while not (found := owner.get_new_notifs()) and time.monotonic() < ends:
        pass
    return found


found = {}
lent = owner.register_memory([(old, SIZE, 0, "")], "DRAM")
reader.add_remote_agent(owner.get_agent_metadata())
owner.deregister_memory(lent)
owner.register_memory([(new, SIZE, 0, "")], "DRAM")
reader.add_remote_agent(owner.get_agent_metadata())
found["read of the old region after the new metadata"] = read(old)
reader.remove_remote_agent("owner")
reader.add_remote_agent(owner.get_agent_metadata())
found["after the agent was removed and loaded again"] = read(old)
transfer = made(new, b"first")
posted(transfer)
message()
posted(transfer)
found["message of a transfer that is posted again without one"] = message().get("reader")
file = os.open("file", os.O_RDWR | os.O_CREAT)
os.truncate(file, SIZE)
disk = agent("disk", "POSIX")
disk.register_memory([(into, SIZE, 0, "")], "DRAM")
disk.register_memory([(0, SIZE, file, "")], "FILE")
ends = disk.get_xfer_descs([(into, SIZE, 0)], "DRAM"), disk.get_xfer_descs([(0, SIZE, file)], "FILE")
try:
    disk.initialize_xfer("WRITE", *ends, "disk", b"done")
    found["transfer to a file with a message"] = "made"
except Exception as error:
    found["transfer to a file with a message"] = str(error)
for name, value in found.items():
    print(f"{name}: {value}")
same = list(found.values()) == ["DONE", "NIXL_ERR_NOT_FOUND", [b"first"], "NIXL_ERR_BACKEND"]
print("as observed" if same else "CHANGED")
sys.exit(not same)
EOF
venv/bin/python program.py
