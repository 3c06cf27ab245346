"""The files of `kvmesh secure`: an authority, a NATS server's configuration, each user's files."""
