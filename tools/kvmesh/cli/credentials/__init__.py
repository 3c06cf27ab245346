"""What `kvmesh secure` writes: an authority, a NATS server's configuration, each user's files."""
