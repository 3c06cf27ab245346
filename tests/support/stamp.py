"""A fixed request stamp, so that parsed requests and their answers have constant ids."""

from kvmesh.frontend.apis.base import RequestStamp

STAMP = RequestStamp("0" * 24, 1_700_000_000)
