"""Messages of the bus: msgspec structs, encoded with msgpack.

Compatibility: decoders ignore unknown fields and new fields have defaults, so services of two
versions run side by side. Messages on the token and event paths are arrays (`array_like`), which
grow at the end only. Hash and token arrays are packed little-endian buffers (uint64 and uint32):
they pass from the wire to the native core without a Python object per element.
"""

from kvmesh.bus.messages.cache import *
from kvmesh.bus.messages.codec import *
from kvmesh.bus.messages.control import *
from kvmesh.bus.messages.discovery import *
from kvmesh.bus.messages.frontends import *
from kvmesh.bus.messages.kv_events import *
from kvmesh.bus.messages.kvbm import *
from kvmesh.bus.messages.layout import *
from kvmesh.bus.messages.planning import *
from kvmesh.bus.messages.routing import *
from kvmesh.bus.messages.sequences import *
from kvmesh.bus.messages.work import *
